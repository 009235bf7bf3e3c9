"""The draft worker's end of both streams: proposals up, commits down, in rounds or running ahead.

Does not know: how chains and branches are made (engine/draft_session.py), or when they pay (scheduling/pacing.py).
Start reading: `worker.py`.
"""
