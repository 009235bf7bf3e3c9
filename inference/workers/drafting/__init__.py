"""Both ends of Assist: draft workers, for a pool or for their own process, and the service of the target they help.

Does not know: how chains and branches are made (engine/draft_session.py), when they pay (scheduling/pacing.py), or
which worker helps a session (engine/pool.py).
Start reading: `session.py` for the draft's end, `service.py` for the target's.
"""
