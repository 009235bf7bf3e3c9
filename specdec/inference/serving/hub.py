"""Models of the Hugging Face hub, whose ids every command takes in place of model directories.

This module decides which names are ids, which files of a model are needed, and how failures are explained. Cache,
tokens, offline mode and progress bars are huggingface_hub's, with HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from specdec.inference.errors import ConfigError

_ID = re.compile(r"[\w.-]+/[\w.-]+")
OF_TOKENIZERS = ["*.json", "*.jinja", "*.model", "*.txt"]
WANTED = [*OF_TOKENIZERS, "*.safetensors"]
ELSEWHERE = ["*/*"]
"""Patterns of files that are not downloaded: subfolders have the same weights in other formats."""


def is_hub_id(name: str) -> bool:
    """Return whether a name is a hub's id: it has the form NAMESPACE/NAME, and there is no such path here."""
    return _ID.fullmatch(name) is not None and not Path(name).exists() and name.split("/")[0] not in (".", "..")


def model_directory(model_id: str, revision: str | None = None, wanted: Sequence[str] = WANTED) -> Path:
    """Return the directory of a model in the hub's cache, after a download of what it lacks.

    Args:
        model_id: NAMESPACE/NAME.
        revision: branch, tag or commit; None: the default branch.
        wanted: patterns of the files that are needed.

    Raises:
        ConfigError: the model cannot be downloaded; the message names the reason.
    """
    from huggingface_hub import constants, errors, snapshot_download

    asked = f"model {model_id}" + (f" at revision {revision}" if revision else "")
    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=[*wanted], ignore_patterns=ELSEWHERE))
    except errors.GatedRepoError as exc:
        where = f"{constants.ENDPOINT}/{model_id}"
        raise ConfigError(f"{asked} is gated: accept its terms at {where}, and set HF_TOKEN") from exc
    except errors.RevisionNotFoundError as exc:
        raise ConfigError(f"{asked}: {constants.ENDPOINT} has the model, but no such revision") from exc
    except errors.RepositoryNotFoundError as exc:
        raise ConfigError(
            f"{asked}: there is no such directory here, and no such model at {constants.ENDPOINT}; "
            "a private one needs HF_TOKEN"
        ) from exc
    except errors.LocalEntryNotFoundError as exc:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise ConfigError(
            f"{asked}: there is no such directory here, no such model in the cache {constants.HF_HUB_CACHE}, and {why}"
        ) from exc
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as exc:
        raise ConfigError(f"{asked} cannot be downloaded from {constants.ENDPOINT}: {exc}") from exc
