"""Runs the sources of NxDI (AWS's NxD Inference) on a CPU, as the reference for its double in tests/support.

`make test-nxdi NXDI_SOURCES=DIR` runs the neuron tests on it. Import hooks (`hooks`) let NxD and NxDI be imported from
DIR as they are, with stand-ins for the packages that only a Neuron machine has (`stubs`) and seven changes where the
device would be (`device`).
"""
