"""Prompts from flags or a file, which are completed at the same time, and shown in order, as text, tokens or JSON.

Does not know: where the tokens come from; that is a `Completer`.
Start reading: `topologies.py`.
"""
