"""vLLM as a target's engine: sessions before its `AsyncLLM`, draft trees in its cores, choice of tokens in its workers.

Three kinds of processes run parts of it. The front is this project's server, or its pool beside `vllm serve`;
`mailbox.py` joins it to the schedulers in vLLM's engine cores, one per data-parallel rank. vLLM starts cores and
workers, and finds this project's classes by their dotted names.

Does not know: gRPC, text, or which draft worker helps a session.
Start reading: `engine.py`, `scheduler.py`, then `runner_v2.py`.
"""
