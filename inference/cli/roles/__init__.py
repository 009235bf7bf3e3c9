"""One file per value of --role: its flags, its configurations, what it runs.

Does not know: how anything is served; each role imports that when it runs, so that --help is quick.
Start reading: `target.py`; `registry.py` lists them all.
"""
