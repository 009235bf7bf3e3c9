"""Storage of compiled models: the store, its upkeep, the folder of the compiler, and folders of other programs.

Does not know: NxDI; a caller passes what a model depends on, and a function that compiles it.
Start reading: `store.py`, then `artifacts.py`.
"""
