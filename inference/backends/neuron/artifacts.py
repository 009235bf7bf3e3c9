"""Where compiled models lie: one folder per configuration and checkpoint, found again by a key of both.

NxDI has no such key, and would load artifacts of another model or width without a word. Artifacts hold the weights too
(`save_sharded_checkpoint`), so the key covers the checkpoint's files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

ENVIRONMENT = "NEURON_COMPILED_ARTIFACTS"
WORK_DIR = "BASE_COMPILE_WORK_DIR"
MANIFEST = "specdec.json"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
KEY_DIGITS = 20
PROGRESS_S = 30.0
"""Between two lines of progress while the compiler, which may take an hour, says nothing."""


def artifacts_root(asked: Path | None, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of all artifacts: the one asked for, the environment's, or one in the user's cache."""
    if asked is not None:
        return asked
    if environment.get(ENVIRONMENT):
        return Path(environment[ENVIRONMENT])
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "specdec" / "neuron"


def artifact_key(description: Mapping[str, Any], checkpoints: Sequence[Path]) -> str:
    """A name for what a compilation depends on.

    Args:
        description: all settings; what JSON cannot hold counts by its text.
        checkpoints: model directories or weight files; counted by the content of config.json and by name, size and time
            of every weight file.
    """
    identity = {"description": description, "checkpoints": [_identity(path) for path in checkpoints]}
    text = json.dumps(identity, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


def _identity(path: Path) -> dict[str, Any]:
    files = [path] if path.is_file() else [file for kind in WEIGHTS for file in sorted(path.glob(kind))]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    config = path / "config.json"
    digest = hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else ""
    return {"config": digest, "weights": stats}


def find_or_compile(root: Path, key: str, manifest: Mapping[str, Any], compile_into: Callable[[Path], None]) -> Path:
    """The folder of a compiled model; compiles if there is none.

    The folder appears under its name only when it is complete, so a compile that was killed leaves no half of one, and
    two that run at once do not meet.
    """
    folder = root / key
    if (folder / MANIFEST).is_file():
        logger.info("compiled model %s: hit in %s", key, root)
        return folder
    logger.info("compiled model %s: miss in %s, compiling", key, root)
    partial = root / f"{key}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with _work_dir(root / f"{key}.work-{os.getpid()}"), _progress(key):
        compile_into(partial)
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True, default=str) + "\n")
    _publish(partial, folder)
    return folder


def _publish(partial: Path, folder: Path) -> None:
    """Give a finished folder its name; another process may have been faster with the same content.

    Where folders cannot be renamed, as on a mounted object store, it is copied file by file: the manifest comes last,
    and without it nobody reads a folder.
    """
    try:
        partial.rename(folder)
    except OSError:
        if not (folder / MANIFEST).is_file():
            _copy_into(folder, partial)
        shutil.rmtree(partial, ignore_errors=True)


def _copy_into(folder: Path, finished: Path) -> None:
    files = [file for file in sorted(finished.rglob("*")) if file.is_file() and file.name != MANIFEST]
    for file in [*files, finished / MANIFEST]:
        copy = folder / file.relative_to(finished)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


@contextmanager
def _work_dir(folder: Path) -> Iterator[None]:
    """The compiler's own folder: two compilers in one would overwrite each other. Kept if it fails, for its logs."""
    before = os.environ.get(WORK_DIR)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[WORK_DIR] = f"{folder}/"
    try:
        yield
    except BaseException:
        logger.error("the compiler's files are kept in %s", folder)
        raise
    finally:
        if before is None:
            del os.environ[WORK_DIR]
        else:
            os.environ[WORK_DIR] = before
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _progress(key: str) -> Iterator[None]:
    """A line now and then, from a thread of its own: the compiler holds this one."""
    started, done = time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(PROGRESS_S):
            logger.info("compiled model %s: compiling for %.0f s", key, time.monotonic() - started)

    reporter = threading.Thread(target=report, name="compile-progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()
    logger.info("compiled model %s: compiled in %.0f s", key, time.monotonic() - started)
