"""Report: findings from records of requests, and tables, plots and files from findings.

Does not know: how the records were made.
Start reading: `findings.py`, then `files.py`.
"""
