"""The backend for every family that Transformers knows, on CPU or CUDA.

Does not know: any family by name; what it needs to know of attention is recorded (`attention.py`).
Start reading: `backend.py`.
"""
