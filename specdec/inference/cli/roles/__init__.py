"""Roles, one file per value of --role, with the settings of the role, and the function that runs it.

Does not know: how anything is served; a role imports the modules for that only when it runs, so that --help is quick.
Start reading: `target.py`; `registry.py` lists them all.
"""
