"""The backend for all families of Transformers with plain keys and values, on CPU, CUDA or TorchNeuron.

Does not know: any family by name; a recorded pass shows the shapes of its attention (`attention.py`).
Start reading: `backend.py`.
"""
