"""The CPU backend: this project's own graph on ONNX Runtime, over packed weights.

Does not know: torch and Transformers, except for packing a checkpoint the first time (`packing.py`).
Start reading: `backend.py`, then `graph.py`.
"""
