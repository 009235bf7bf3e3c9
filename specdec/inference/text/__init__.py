"""Text and conversations as token ids and back; grammars, calls, reasoning, stop strings, maps between vocabularies.

Does not know: any model.
Start reading: `tokenizer.py`.
"""
