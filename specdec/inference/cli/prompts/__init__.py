"""Prompts from a flag or a file, completed at once and shown one after another, as text or as JSON.

Does not know: where the tokens come from; that is a `Completer`.
Start reading: `topologies.py`.
"""
