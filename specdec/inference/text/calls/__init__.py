"""Function calls in a model's text: read while it grows, written into prompts, turned into grammars.

Does not know: tokens, templates, HTTP.
Start reading: `reader.py`; the formats are in `formats.py`.
"""
