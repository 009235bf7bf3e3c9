"""Report of a comparison: computes results from the records of requests, and writes tables, plots and files of them.

Does not know: how the records were made.
Start reading: `findings.py`, then `files.py`.
"""
