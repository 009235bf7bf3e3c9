"""OpenAI's and Anthropic's HTTP APIs, and a web page, in front of any `Completer`, an object that answers requests.

Does not know: models, tokenizers, or whether its completer is in this process.
Start reading: `app.py`; bodies of requests: `bodies/schema.py`.
"""
