"""A contract double of NxD Inference 0.9: the same module paths and calls, strict, on tiny Transformers models.

It has the graphs of slots and of fused pairs, which choose greedily. EAGLE, Medusa, sampling, quantization and CPU mode
run only on NxDI's own sources. It enforces the rules of docs/neuron_rules.md. Where NxDI raises, the double raises;
where NxDI is silently wrong, the double computes the same wrong thing on real keys and values, so that a test that
compares tokens notices. Nothing in it imports the project.
"""

from tests.support.nxdi_double.install import install

__all__ = ["install"]
