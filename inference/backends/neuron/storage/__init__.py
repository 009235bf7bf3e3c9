"""Storage of compiled models: the store, its upkeep, the folder of the compiler, and folders of other programs.

Does not know: NxDI; a caller says what a model depends on, and how it is compiled.
Start reading: `store.py`, then `artifacts.py`.
"""
