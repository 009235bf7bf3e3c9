"""HTTP ports: connections and their limits, health probes, and the middleware before the HTTP application.

Does not know: the endpoints of the application.
Start reading: `port.py`, then `middleware.py`.
"""
