"""Maintenance of a store of compiled models: list, verify, clean, look for a usable one. Needs no Neuron package."""

from __future__ import annotations

import json
import time
from calendar import timegm
from collections.abc import Iterator
from pathlib import Path

from specdec.inference.backends.neuron.environment import toolchain
from specdec.inference.backends.neuron.storage.artifacts import artifacts_root, compiled_for, differences, flat
from specdec.inference.backends.neuron.storage.store import Publication, discard, find, publications
from specdec.inference.errors import ConfigError


def report(action: str, root: Path | None, older_than_h: float) -> Iterator[tuple[str, bool]]:
    """Return lines about a store, each with whether it is good news; bad news makes the command fail.

    Args:
        action: "ls" lists each model with all that it was compiled for; "verify" reads every file; "clean" deletes the
            publications that no server loads; "ready" looks for a model that this installation's toolchain compiled.
        root: folder of the store; None: the environment's, or the one in the user's cache.
        older_than_h: "clean" keeps publications begun less than this many hours ago.

    Raises:
        ConfigError: the folder does not exist.
    """
    where = artifacts_root(root)
    if not where.is_dir():
        raise ConfigError(f"compiled models: {where} is not a directory")
    if action == "ls":
        return _listed(publications(where))
    if action == "ready":
        return _ready(where, publications(where))
    return _verified(publications(where)) if action == "verify" else _cleaned(publications(where), older_than_h)


def _listed(found: list[Publication]) -> Iterator[tuple[str, bool]]:
    for each in found:
        if each.manifest is None:
            yield f"{each.folder}  not finished, begun {_begun(each)}", True
            continue
        state = f"{each.size_bytes / 2**30:.2f} GiB" if each.is_whole() else "DAMAGED (verify says how)"
        yield f"{each.folder}  {state}  {' '.join(each.manifest.get('checkpoints', []))}", each.is_whole()
        for name, value in sorted(flat(compiled_for(each.manifest))):
            yield f"    {name} {json.dumps(value)}", True


def _verified(found: list[Publication]) -> Iterator[tuple[str, bool]]:
    for each in found:
        if each.manifest is None:
            yield f"{each.folder}  not finished, begun {_begun(each)}", True
            continue
        faults = each.faults()
        yield f"{each.folder}  {'; '.join(faults) or 'whole'}", not faults


def _cleaned(found: list[Publication], older_than_h: float) -> Iterator[tuple[str, bool]]:
    for each in found:
        if each.folder == find(each.folder.parents[1], each.key):
            continue  # the one that servers load
        if time.time() - _begun_s(each) < older_than_h * 3600:
            yield f"{each.folder}  kept: begun {_begun(each)}", True
        elif discard(each.folder):
            yield f"{each.folder}  deleted", True
        else:
            yield f"{each.folder}  this store deletes nothing: delete it with the store's own tools", False


def _ready(where: Path, found: list[Publication]) -> Iterator[tuple[str, bool]]:
    """Yield (line, is good news): a whole model that this toolchain compiled; if none, how each model differs."""
    ours, whole = toolchain(), [each for each in found if each.is_whole()]
    others = [(each, differences({name: (each.manifest or {}).get(name) for name in ours}, ours)) for each in whole]
    if of_ours := [each for each, differing in others if not differing]:
        yield f"{of_ours[0].folder}  was compiled by this installation's versions", True
        return
    yield from ((f"{each.folder}  {'; '.join(differing)}", False) for each, differing in others)
    yield f"{where}  has no model that this installation's versions compiled", False


def _begun(publication: Publication) -> str:
    started = publication.started
    return f"{started.get('time', 'at no known time')} by process {started.get('pid')} of {started.get('host')}"


def _begun_s(publication: Publication) -> float:
    """Return the time of the start in seconds since 1970; 0 if it is unknown."""
    try:
        return float(timegm(time.strptime(str(publication.started["time"]), "%Y-%m-%dT%H:%M:%SZ")))
    except (KeyError, ValueError):
        return 0.0
