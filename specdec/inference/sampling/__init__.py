"""Sampling, from a row of logits to a token: bias and penalties, truncation, Gumbel noise, log-probabilities.

The noise follows from seed, position and token id, so that draft and target share the random numbers.
Everything gives the same bits on numpy arrays and torch tensors. Does not know: sequences, drafts or models.
Start reading: `choice.py`, then `noise.py`.
"""
