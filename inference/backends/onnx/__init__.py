"""The CPU backend: a graph of ours on ONNX Runtime, over packed weights.

Does not know: torch and Transformers, but to pack a checkpoint the first time (`packing.py`).
Start reading: `backend.py`, then `graph.py`.
"""
