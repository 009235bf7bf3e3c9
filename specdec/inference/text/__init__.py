"""Conversion of text and conversations to token ids and back, stop strings, and maps between vocabularies.

Does not know: any model.
Start reading: `tokenizer.py`.
"""
