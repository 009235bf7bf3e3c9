"""Conversion of texts and conversations to token ids and back; grammars, tool calls, reasoning, stop strings.

Does not know: any model.
Start reading: `tokenizer.py`.
"""
