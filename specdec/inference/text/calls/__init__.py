"""Calls of tools in a model's text: read while the text grows, written into prompts, demanded by grammars.

Does not know: tokens, templates, HTTP.
Start reading: `reader.py`; the formats are in `formats.py`.
"""
