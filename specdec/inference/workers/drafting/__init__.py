"""Both ends of the gRPC stream Assist: draft workers, for a target's pool or their own process; the target's service.

Does not know: how chains and branches are made (engine/draft_session.py), when they pay (scheduling/pacing.py), or
which worker helps a session (engine/pool.py).
Start reading: `session.py` for the draft's end, `service.py` for the target's.
"""
