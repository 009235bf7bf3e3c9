"""Reports of what requests cost, for people and machines: figures, profile, Prometheus metrics, time-line, spans.

Does not know: servers and engines, which pass in their events.
Start reading: `stats.py`, then `metrics.py`.
"""
