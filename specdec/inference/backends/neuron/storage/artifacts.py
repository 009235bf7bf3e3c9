"""Compiled models in a folder (the store), found by a key of configuration and checkpoints, or compiled into it.

NxDI has no such key, and would silently load artifacts of another model or width. Artifacts hold the weights too
(`save_sharded_checkpoint`), so the key covers the checkpoint's content.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specdec.inference.backends.digests import digests_of, user_cache
from specdec.inference.backends.identity import contents
from specdec.inference.backends.neuron.storage import store
from specdec.inference.backends.neuron.storage.workshop import workshop
from specdec.inference.errors import ConfigError

logger = logging.getLogger(__name__)

ENVIRONMENT = "NEURON_COMPILED_ARTIFACTS"
KEY_DIGITS = 20
READ = ("config.json", "*.safetensors", "*.bin", "*.pt")
_OF_NO_CONSEQUENCE = ("key", "files", "checkpoints")
"""Manifest entries that are no conditions of a compilation: names of its result, of its files and of its sources."""
_NOTHING: tuple[Any, ...] = (None, False, {}, [])
"""Values that count as unset, since versions of NxDI name more or fewer settings."""


def artifacts_root(asked: Path | None) -> Path:
    """Return the folder of all compiled models: `asked`, or if None, NEURON_COMPILED_ARTIFACTS or the user's cache."""
    return asked or Path(os.environ.get(ENVIRONMENT) or user_cache() / "neuron")


@dataclass(frozen=True)
class Wanted:
    """Conditions that a compiled model must have been made from.

    Attributes:
        description: all settings; for a value that JSON cannot hold, its text is compared.
        checkpoints: model directories or files of weights, whose contents are compared.
    """

    description: Mapping[str, Any]
    checkpoints: tuple[Path, ...]

    @cached_property
    def conditions(self) -> dict[str, Any]:
        """Everything that a compilation depends on, as JSON values; no path, no time."""
        settings = {**self.description, "contents": [_contents(path) for path in self.checkpoints]}
        if "neuron_config" in settings:  # it counts by its content, in `checkpoints`
            settings["neuron_config"] = dict(settings["neuron_config"])
            settings["neuron_config"].pop("quantized_checkpoints_path", None)
        conditions: dict[str, Any] = json.loads(json.dumps(settings, default=str))
        return conditions

    @cached_property
    def key(self) -> str:
        """Hash of the conditions, which names the model in a store."""
        text = json.dumps(self.conditions, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]

    @property
    def manifest(self) -> dict[str, Any]:
        """Content of the model's manifest, to which the store adds `files`."""
        return {**self.conditions, "key": self.key, "checkpoints": [str(path) for path in self.checkpoints]}


def find_or_compile(root: Path, wanted: Wanted, compile_into: Callable[[Path], None], *, policy: str = "auto") -> Path:
    """Return the folder of a compiled model; compile the model if the store lacks it.

    Args:
        root: a store, or one compiled model of a store.
        compile_into: function that compiles into a local folder, which is published in the store when it returns.
        policy: one of COMPILE_POLICIES; all but "never" compile a model that the store does not have.

    Raises:
        ConfigError: the store lacks the model and the policy is "never", or the store takes no files; or `root` is one
            model, compiled for other settings.
    """
    key, alone = wanted.key, store.read_publication(root)
    if alone.manifest is not None:
        return _checked(alone, alone.manifest, wanted)
    if (folder := store.find(root, key)) is not None:
        logger.info("compiled model %s: hit in %s", key, root)
        return folder
    if policy == "never":
        raise ConfigError(f"compiled model {key} is not in {root} (--compile never){_nearest(root, wanted)}")
    logger.info("compiled model %s: miss in %s, compiling", key, root)
    folder = store.begin(root, key)
    try:
        with workshop(key) as made:
            compile_into(made)
            faster = store.find(root, key)
            if faster is None:
                store.publish(made, folder, wanted.manifest)
    except BaseException:
        store.discard(folder)
        raise
    if faster is not None:
        logger.info("compiled model %s: another process compiled it first, and its files are used", key)
        store.discard(folder)
    return store.find(root, key) or folder


def _checked(alone: store.Publication, manifest: Mapping[str, Any], wanted: Wanted) -> Path:
    """Return the folder of a compiled model, after a check that it fits what is wanted.

    Args:
        alone: the compiled model, which the user named instead of a store of several.
        manifest: its manifest.
        wanted: conditions that it must have been made from.

    Raises:
        ConfigError: it was made from other ones, or files are lost.
    """
    found = [*differences(compiled_for(manifest), wanted.conditions), *([] if alone.is_whole() else ["files are lost"])]
    if found:
        raise ConfigError(f"{alone.folder} is a compiled model, but not for these settings: {'; '.join(found)}")
    return alone.folder


def compiled_for(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditions in a manifest: everything that its model was compiled for."""
    return {name: value for name, value in manifest.items() if name not in _OF_NO_CONSEQUENCE}


def _nearest(root: Path, wanted: Wanted) -> str:
    """Return the end of an error message: the model in the store that differs least, and its differences."""
    all_of_it = ((each.key, each.manifest) for each in store.publications(root) if each.manifest is not None)
    found = {key: differences(compiled_for(manifest), wanted.conditions) for key, manifest in all_of_it}
    if not found:
        return ": there is no compiled model at all"
    key = min(found, key=lambda each: len(found[each]))
    return f"; the nearest, {key}, differs: {'; '.join(found[key]) or 'its files are damaged'}"


def _contents(checkpoint: Path) -> dict[str, str]:
    """Return SHA-256 by name of the files that a compilation reads: config.json and all weights, or one file."""
    if checkpoint.is_file():
        return {checkpoint.name: digests_of([checkpoint])[0]}
    return dict(contents(checkpoint, READ))


def differences(there: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Return a line for each value that differs, such as `neuron_config.tp_degree 8 there, 2 asked`; sorted by name."""
    ours, theirs = dict(flat(asked)), dict(flat(there))
    names = sorted(ours.keys() | theirs.keys())
    return [
        f"{name} {_shown(theirs.get(name))} there, {_shown(ours.get(name))} asked"
        for name in names
        if theirs.get(name) != ours.get(name) and not (theirs.get(name) in _NOTHING and ours.get(name) in _NOTHING)
    ]


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings with its dotted name."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
