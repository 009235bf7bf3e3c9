"""HTTP answers made of a completion's events: JSON documents, server-sent events and errors, in each API's form.

Does not know: ports, or where the events come from.
Start reading: `stream.py`, then `formats.py`.
"""
