"""From records of requests to findings, and from findings to tables, plots and files.

Does not know: how the records were made.
Start reading: `findings.py`, then `files.py`.
"""
