"""Contracts of models and grammars.

Backends, which keep sequences in slots, return logits; decoders return verdicts, and proposers draft tokens.

A slot is a model's room for the keys and values of one sequence. Positions are absolute: a prompt of n tokens occupies
positions 0 to n - 1, and the first output token is chosen for position n. Protocols of optional abilities are
recognised by `isinstance`. When a pass or step raises, the positions that it was to write count as not written, and
other slots as unchanged. The engine then runs each sequence again, alone; if memory ran out, it runs fewer sequences at
once.
Does not know: implementations or callers of these contracts.
Start reading: `slots.py`, then `decoder.py` and `proposer.py`.
"""
