"""Calls of functions in a model's text: read while it grows, written down, made a grammar.

Does not know: tokens, templates, HTTP.
Start reading: `reader.py`; which ways there are is in `formats.py`.
"""
