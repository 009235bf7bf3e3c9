"""Roles, one file per value of --role: settings, and the function that runs it.

Does not know: how anything is served; each role imports that when it runs, so that --help is quick.
Start reading: `target.py`; `registry.py` lists them all.
"""
