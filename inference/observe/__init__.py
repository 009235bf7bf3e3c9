"""What requests cost, told to people and machines: figures, profile, Prometheus metrics, time-line, spans.

Does not know: who serves. It is fed with events and commits.
Start reading: `stats.py`, then `metrics.py`.
"""
