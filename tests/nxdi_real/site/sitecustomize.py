"""Makes NxDI's own sources importable, on a CPU, in each Python with this folder on PYTHONPATH."""

from tests.nxdi_real.hooks import arm

arm()
