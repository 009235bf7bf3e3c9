"""Both ends of the gRPC stream Assist, over which draft workers send draft tokens to a target.

Does not know: how draft tokens are made (engine/draft_session.py), how many pay (scheduling/pacing.py), or which worker
drafts for a request (engine/pool.py).
Start reading: `session.py` for the draft worker's end, `service.py` for the target's.
"""
