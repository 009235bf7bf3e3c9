"""The target's end of Assist: draft workers attach to its pool, or to the requests of their own process.

Does not know: what a pass is, or which worker helps whom (engine/pool.py).
Start reading: `service.py`.
"""
