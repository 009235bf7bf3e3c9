"""Measurements of this project's parts in their own process; `comparison` measures whole servers from outside."""
