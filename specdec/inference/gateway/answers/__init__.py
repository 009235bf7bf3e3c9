"""Answers: documents, server-sent events, and errors in each API's shape, made of the events of a completion.

Does not know: ports, or where the events come from.
Start reading: `stream.py`, then `formats.py`.
"""
