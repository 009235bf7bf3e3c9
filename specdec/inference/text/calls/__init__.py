"""Tool calls in a model's text: reading them while the text grows, writing them, and grammars that demand them.

Does not know: tokens, templates, HTTP.
Start reading: `reader.py`; the formats are in `formats.py`.
"""
