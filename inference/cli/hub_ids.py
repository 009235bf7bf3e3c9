"""Which flags name models, and how their hub ids become directories, before anything is loaded."""

from __future__ import annotations

import argparse

from inference.errors import ConfigError
from inference.serving.hub import is_hub_id, model_directory

REVISIONS = {"model": "revision", "target_model": "revision", "draft_model": "draft_revision", "tokenizer": "revision"}
"""Flags that name a model, and those that name its revision."""


def fetch_models(args: argparse.Namespace) -> None:
    """Put the local directory in the place of every hub id among the flags, downloading what the cache lacks.

    Raises:
        ConfigError: a model is gated, missing, or out of reach; or a revision goes with no id.
    """
    revisions = {name: getattr(args, name) for name in set(REVISIONS.values()) if getattr(args, name, None)}
    unused = set(revisions)
    for flag, revision in REVISIONS.items():
        value = getattr(args, flag, None)
        if value is not None and is_hub_id(str(value)):
            directory = model_directory(str(value), revisions.get(revision))
            setattr(args, flag, type(value)(directory))
            unused.discard(revision)
    for name in unused:
        raise ConfigError(f"--{name} {revisions[name]}: no model is named by a hub id, and directories have none")
