"""What is measured of passes, arrivals and verdicts, and what is decided by it: widths, waits, pace, draft length.

Pure: no clock, no loop, no model. Does not know who asks.
Start reading: `widths.py` and `waiting.py`; docs/scheduling.md has the reasons.
"""
