"""A contract double of NxD Inference 0.9: the same module paths and calls, strict, on tiny Transformers models.

It enforces the rules of docs/neuron_rules.md. Where NxDI raises, the double raises; where NxDI is silently wrong,
the double computes the same wrong thing on real keys and values, so that a test that compares tokens notices.
Nothing in it imports the project.
"""

from tests.support.nxdi_double.install import install, write_packages

__all__ = ["install", "write_packages"]
