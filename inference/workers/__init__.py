"""Requests and answers on their way between processes: completers, servicers, and messages.

Does not know: any algorithm; it translates between wire and engine.
Start reading: `completion.py`, then `local.py` and `remote.py`; every message is made and read in `convert.py`.
"""
