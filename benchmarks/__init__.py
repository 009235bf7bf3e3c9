"""Measurements of the parts from inside; `comparison` measures servers from outside."""
