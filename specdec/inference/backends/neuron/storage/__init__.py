"""Storage of compiled models: a folder of them (the store), its upkeep, and folders of the compiler and other programs.

Does not know: NxDI; a caller passes what a model depends on, and a function that compiles it.
Start reading: `store.py`, then `artifacts.py`.
"""
