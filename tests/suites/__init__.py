"""Long trials of real servers, run by hand and in CI: `make hostile`, `make chaos`, `make soak`. pytest collects none.

`hostile/` attacks servers that others use meanwhile, `chaos/` kills and cuts them, `soak.py` looks for leaks. They
share `tests/support/cluster.py` (the servers), `clients.py` (their users) and `trial.py` (promises, progress,
the end).
"""
