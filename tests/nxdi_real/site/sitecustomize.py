"""Start of a Python with this folder on PYTHONPATH: its Neuron packages are NxDI's own sources, on a CPU."""

from tests.nxdi_real.hooks import arm

arm()
