"""Suite with all attacks that once hurt a server, on servers that ordinary clients use meanwhile.

`__main__.py` starts the servers and the bystanders: clients that must get their tokens, and a process that times health
checks. `attack.py` is the attackers' process, with lower priority, since a real attacker has another machine. It runs
the attacks of `peers.py` (gRPC), `browsers.py` (HTTP) and `fuzz.py`.
"""
