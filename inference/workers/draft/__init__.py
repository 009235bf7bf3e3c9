"""The draft worker's end of Assist: proposals up, in rounds or running ahead, for a pool or for its own process.

Does not know: how chains and branches are made (engine/draft_session.py), or when they pay (scheduling/pacing.py).
Start reading: `session.py`.
"""
