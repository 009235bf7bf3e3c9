"""When speculation pays: a search over ways to serve and conditions within a time, and advice with its evidence.

Does not know: how anything is measured; each group of trials is an ordinary comparison.
Start reading: `search.py`, then `advice.py`; `app.py` joins them to servers.
"""
