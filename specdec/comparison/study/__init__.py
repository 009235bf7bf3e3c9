"""Study of when speculation pays: a search over topologies and conditions in limited time, and advice with evidence.

Does not know: how anything is measured; each group of trials (ways to serve, tried together) is an ordinary comparison.
Start reading: `search.py`, then `advice.py`; `laboratory.py` connects them to servers.
"""
