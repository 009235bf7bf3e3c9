"""Text: token ids of texts and conversations, and back; grammars, tool calls, reasoning, stop strings, vocabularies.

Does not know: any model.
Start reading: `tokenizer.py`.
"""
