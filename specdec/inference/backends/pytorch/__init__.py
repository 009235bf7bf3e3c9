"""The backend for every family that Transformers knows, on CPU or CUDA.

Does not know: any family by name; a recorded pass shows the shapes of its attention (`attention.py`).
Start reading: `backend.py`.
"""
