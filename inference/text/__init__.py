"""Text and conversations to token ids and back, stop strings, and which vocabularies fit together.

Does not know: any model.
Start reading: `tokenizer.py`.
"""
