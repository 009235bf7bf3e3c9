"""HTTP ports: connections and their limits, probes, and what a request passes before the application reads it.

Does not know: the endpoints of the application.
Start reading: `port.py`, then `middleware.py`.
"""
