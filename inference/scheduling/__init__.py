"""Scheduling: widths, waits, pace and draft length, decided by measured passes, arrivals and verdicts.

Pure: no clock, no loop, no model. Does not know its callers.
Start reading: `throughput.py`, `widths.py` and `waiting.py`; docs/scheduling.md has the reasons.
"""
