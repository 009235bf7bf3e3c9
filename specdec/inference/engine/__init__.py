"""Sessions, slots, and the loop that serves them: admit, step, deliver. One asyncio task, one model thread.

Does not know: text, messages, or what a model is made of.
Start reading: `loop.py`, `batching.py`, then `target.py` and `draft.py`.
"""
