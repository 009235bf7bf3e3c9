"""Both ends of the gRPC stream Assist: draft workers, which help any target or their own process; the target's service.

Does not know: how chains and branches are made (engine/draft_session.py), when they pay (scheduling/pacing.py), or
which worker helps a session (engine/pool.py).
Start reading: `session.py` for the draft worker's end, `service.py` for the target's.
"""
