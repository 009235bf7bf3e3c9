"""Scheduling: how many tokens are drafted and verified, when to wait, and how fast to draft, by measured times.

All modules compute from what their callers measured, and read no clock. Does not know: event loops, models, callers.
Start reading: `throughput.py`, `widths.py` and `waiting.py`; docs/scheduling.md has the reasons.
"""
