"""Makes the sources of NxDI (AWS's NxD Inference) importable, in each Python with this folder on PYTHONPATH."""

from tests.nxdi_real.hooks import arm

arm()
