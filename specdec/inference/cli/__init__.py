"""The command line of main.py: flags, configuration files, roles, and the display of prompts and answers.

Does not know: models, gRPC, tokens. Parsed flags end in `flags.py`: roles get typed settings.
Start reading: `app.py`, then a role in `roles/`.
"""
