"""Conversation in a terminal: the loop of questions and answers, and the two ways to reach a model.

Does not know: flags.
Start reading: `conversation.py`, then `speakers.py`.
"""
