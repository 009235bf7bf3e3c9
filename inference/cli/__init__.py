"""The command line of main.py: flags, configuration files, roles, and what people see of prompts and answers.

Does not know: models, gRPC, tokens. From `settings.py` on, nobody sees parsed flags any more.
Start reading: `app.py`, then a role in `roles/`.
"""
