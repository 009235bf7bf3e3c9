"""Scheduling: how many tokens are drafted and verified, when to wait, and how fast to draft, by measured times.

Pure: no clock, no loop, no model. Does not know its callers.
Start reading: `throughput.py`, `widths.py` and `waiting.py`; docs/scheduling.md has the reasons.
"""
