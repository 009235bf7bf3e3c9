"""Reports of what requests cost, for people and machines: figures, profile, Prometheus metrics, time-line, spans.

Does not know: the servers and engines. They pass in events and commits.
Start reading: `stats.py`, then `metrics.py`.
"""
