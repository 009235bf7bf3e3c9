"""A double (stand-in) of AWS's NxD Inference ("NxDI") 0.9: the same modules and calls, run by Transformers on a CPU.

It has the compiled graphs of single models, and of fused pairs (draft and target in one graph), both with greedy
choice. EAGLE, Medusa, sampling, quantization and CPU mode can be tested only on NxDI's own sources. The double enforces
the rules of docs/neuron_rules.md: where NxDI raises, it raises; where NxDI is silently wrong, it computes the same
wrong thing on real keys and values, so that a test that compares tokens notices. It imports nothing of this project.
"""

from tests.support.nxdi_double.install import install

__all__ = ["install"]
