"""Sampling, from a row of logits to a token: bias and penalties, truncation, the shared noise, log-probabilities.

Everything gives the same bits on numpy arrays and torch tensors. Does not know: sequences, drafts or models.
Start reading: `choice.py`, then `noise.py`.
"""
