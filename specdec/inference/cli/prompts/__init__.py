"""Prompts from a flag or a file, completed together and shown in order, as text, tokens or JSON.

Does not know: where the tokens come from; that is a `Completer`.
Start reading: `topologies.py`.
"""
