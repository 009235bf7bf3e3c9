"""Engines: the sessions of requests, the model's slots, and the loop that admits, runs steps and delivers results.

An engine has one asyncio task, which owns its sessions, and one thread, on which its model runs.
Does not know: text, messages, or what a model is made of.
Start reading: `loop.py`, `batching.py`, then `target.py` and `draft.py`.
"""
