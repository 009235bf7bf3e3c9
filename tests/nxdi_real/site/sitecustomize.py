"""In every Python whose PYTHONPATH begins with this folder, Neuron packages are NxDI's own sources, on a CPU."""

from tests.nxdi_real.hooks import arm

arm()
