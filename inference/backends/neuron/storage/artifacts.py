"""A compiled model for a configuration and its checkpoints: found in the store by a key of both, or compiled into it.

NxDI has no such key, and would load artifacts of another model or width without a word. Artifacts hold the weights too
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

from inference.backends.digests import digests_of, user_cache
from inference.backends.identity import contents
from inference.backends.neuron.storage import store
from inference.backends.neuron.storage.workshop import workshop
from inference.errors import ConfigError

logger = logging.getLogger(__name__)

ENVIRONMENT = "NEURON_COMPILED_ARTIFACTS"
KEY_DIGITS = 20
READ = ("config.json", "*.safetensors", "*.bin", "*.pt")
_OF_NO_CONSEQUENCE = ("key", "files", "checkpoints")
"""In a manifest, but for what it was compiled for: names of places."""
_NOTHING: tuple[Any, ...] = (None, False, {}, [])
"""What a setting is where it is not named: versions of NxDI name more or fewer of them."""


def artifacts_root(asked: Path | None, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of all artifacts: the one asked for, the environment's, or one in the user's cache."""
    if asked is not None:
        return asked
    if environment.get(ENVIRONMENT):
        return Path(environment[ENVIRONMENT])
    return user_cache(environment) / "neuron"


@dataclass(frozen=True)
class Wanted:
    """What a compiled model must have been made from.

    Attributes:
        description: all settings; what JSON cannot hold counts by its text.
        checkpoints: model directories or weight files, which count by their content.
    """

    description: Mapping[str, Any]
    checkpoints: tuple[Path, ...]

    @cached_property
    def conditions(self) -> dict[str, Any]:
        """All that a compilation depends on, as JSON has it: no path, no time."""
        settings = {**self.description, "contents": [_contents(path) for path in self.checkpoints]}
        if "neuron_config" in settings:  # a quantized checkpoint is one of `checkpoints`
            settings["neuron_config"] = dict(settings["neuron_config"])
            settings["neuron_config"].pop("quantized_checkpoints_path", None)
        conditions: dict[str, Any] = json.loads(json.dumps(settings, default=str))
        return conditions

    @cached_property
    def key(self) -> str:
        """A name for the conditions."""
        text = json.dumps(self.conditions, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]

    @property
    def manifest(self) -> dict[str, Any]:
        """What a store keeps of it."""
        return {**self.conditions, "key": self.key, "checkpoints": [str(path) for path in self.checkpoints]}


def find_or_compile(root: Path, wanted: Wanted, compile_into: Callable[[Path], None], *, policy: str = "auto") -> Path:
    """The folder of a compiled model.

    Args:
        root: a store, or one compiled model of a store.
        compile_into: compiles into a local folder, which is published in the store if it returns.
        policy: one of COMPILE_POLICIES; all but "never" compile a model that the store does not have.

    Raises:
        ConfigError: the store does not have it and the policy is "never", or it takes no files; the one model named is
            for other settings.
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
        logger.info("compiled model %s: another process was faster", key)
        store.discard(folder)
    return store.find(root, key) or folder


def _checked(alone: store.Publication, manifest: Mapping[str, Any], wanted: Wanted) -> Path:
    """The folder of a compiled model that was named itself."""
    found = [*differences(compiled_for(manifest), wanted.conditions), *([] if alone.is_whole() else ["files are lost"])]
    if found:
        raise ConfigError(f"{alone.folder} is a compiled model, but not for these settings: {'; '.join(found)}")
    return alone.folder


def compiled_for(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions in a manifest: all that its model was compiled for."""
    return {name: value for name, value in manifest.items() if name not in _OF_NO_CONSEQUENCE}


def _nearest(root: Path, wanted: Wanted) -> str:
    """What a person has to know of the store: the model in it that differs least, and in what."""
    all_of_it = ((each.key, each.manifest) for each in store.publications(root) if each.manifest is not None)
    found = {key: differences(compiled_for(manifest), wanted.conditions) for key, manifest in all_of_it}
    if not found:
        return ": there is no compiled model at all"
    key = min(found, key=lambda each: len(found[each]))
    return f"; the nearest, {key}, differs: {'; '.join(found[key]) or 'its files are damaged'}"


def _contents(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of what a compilation reads, by name: config.json and every weight file, or the one file of weights."""
    if checkpoint.is_file():
        return {checkpoint.name: digests_of([checkpoint])[0]}
    return dict(contents(checkpoint, READ))


def differences(there: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """A line for each value that differs, such as `neuron_config.tp_degree 8 there, 2 asked`; sorted by name."""
    ours, theirs = dict(flat(asked)), dict(flat(there))
    names = sorted(ours.keys() | theirs.keys())
    return [
        f"{name} {_shown(theirs.get(name))} there, {_shown(ours.get(name))} asked"
        for name in names
        if theirs.get(name) != ours.get(name) and not (theirs.get(name) in _NOTHING and ours.get(name) in _NOTHING)
    ]


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested mappings, under its dotted name."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
