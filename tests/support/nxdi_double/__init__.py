"""A contract double (stand-in) of AWS's NxD Inference ("NxDI") 0.9: the same modules and calls, on tiny models.

Its models are those of Transformers. It has the graphs of single models and of fused pairs (draft and target in one
graph), which choose greedily. EAGLE, Medusa, sampling, quantization and CPU mode run only on NxDI's own sources. It
enforces the rules of docs/neuron_rules.md. Where NxDI raises, the double raises; where NxDI is silently wrong, the
double computes the same wrong thing on real keys and values, so that a test that compares tokens notices. Nothing in it
imports the project.
"""

from tests.support.nxdi_double.install import install

__all__ = ["install"]
