"""Long tests of real servers, run by hand and in CI: `make hostile`, `make chaos`, `make soak`. pytest collects none.

`hostile/` attacks servers that others use meanwhile, `chaos/` kills and cuts them, `soak.py` looks for leaks. They
share files of `tests/support`: `cluster.py` (the servers), `clients.py` (their users) and `trial.py` (a suite's
promises, progress and end).
"""
