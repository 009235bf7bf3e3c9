"""Starting the servers, delaying the links between them, sending the requests, keeping what came back.

Does not know: how figures are summed up or shown.
Start reading: `topologies.py`, then `measurement.py`.
"""
