"""Sampling, from a row of logits to a token: bias and penalties, truncation, the shared noise, log-probabilities.

Does not know: sequences, drafts or models. Works alike on numpy and torch, to the bit.
Start reading: `choice.py`, then `noise.py`.
"""
