"""A Python with this folder first on its PYTHONPATH takes NxDI's own sources as Neuron packages, on a CPU."""

from tests.nxdi_real.hooks import arm

arm()
