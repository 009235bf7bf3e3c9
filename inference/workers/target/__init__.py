"""The target's end of both streams: Verify, where the draft has the request, and Assist, where the target has it.

Does not know: what a pass is, or which worker helps whom (engine/pool.py).
Start reading: `verification.py`.
"""
