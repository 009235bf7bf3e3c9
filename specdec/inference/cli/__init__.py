"""Command line of main.py and `specdec`: flags, configuration files, what each --role does, and the display of answers.

Does not know: models, gRPC, tokens. Roles get typed settings, by `inference/declared.py`.
Start reading: `app.py`, then a role in `roles/`.
"""
