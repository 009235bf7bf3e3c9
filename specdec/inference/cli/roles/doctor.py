"""Role doctor: reports from models' files alone whether they would be served, how, and about how fast.

It makes the same checks as servers at their start: those of `inference/checkpoint_files.py`, of
`inference/text/vocabulary.py`, and of the backends, by `inference/backends/registry.py:examine`.
"""

from __future__ import annotations

import math
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from specdec.inference.backends.registry import Fit, available_memory, examine
from specdec.inference.config import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    MIN_VOCABULARY_SHARE,
    SERVICE_FLAGS,
    ObserveConfig,
    usable_core_ids,
    usable_cores,
)
from specdec.inference.errors import ConfigError, SpecDecError
from specdec.inference.observe.host_load import LoadMeter
from specdec.inference.request import MAX_GAMMA
from specdec.inference.serving.models import NGRAM, NO_DRAFT, DefaultSettings, LoadingSettings, Models
from specdec.inference.settings import REQUIRED, group, setting

SHARES = (0.5, 0.7, 0.9)
"""Probabilities that a draft token is accepted if those before it are, for which the greatest speed-up is shown."""
MAX_READ_BYTES = 1 << 28
"""Most bytes of the matrix that is read to measure a bandwidth: more than nearly all caches hold."""
PART_BYTES = 1 << 22
READING_S, GAIN = 1.0, 0.95
"""Seconds, and a factor: to measure a bandwidth, memory is read again and again, until in READING_S seconds the best
time has not fallen below GAIN times what it was."""
BUNDLED_SHARE = "0.7 to 1 in lists and code, 0.3 in prose, as `specdec demo` shows"


@dataclass(frozen=True, slots=True)
class ExaminedModels(Models):
    """Models to examine, each a directory or a hub id, which is downloaded.

    Attributes:
        target: target model.
        draft: draft model; ngram: text that occurred before; without one, the target is examined alone.
    """

    SECTION: ClassVar = "models"
    REVISIONS: ClassVar = {"target": None, "draft": None}

    target: Path = setting(REQUIRED, "target")
    draft: str | None = setting(None, "draft")

    @property
    def paths(self) -> dict[str, Path]:
        """Return the directories of the models by kind: "target", and "draft" if the draft is a model."""
        has_draft = self.draft not in (None, NGRAM, NO_DRAFT)
        return {"target": self.target, **({"draft": Path(str(self.draft))} if has_draft else {})}


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """Settings of --role doctor, which reports whether models would be served, how, and how fast."""

    models: ExaminedModels = group(ExaminedModels)
    loading: LoadingSettings = group(LoadingSettings, "model")
    observe: ObserveConfig = group(ObserveConfig, role="doctor", without=(*SERVICE_FLAGS, "trace", "profile"))


async def run(settings: DoctorSettings) -> int:
    """Print a report on the models; return 1 if one would not be served or draft and target do not fit, else 0."""
    paths, loading = settings.models.paths, settings.loading
    if "neuron" in loading.backend:
        raise ConfigError(f"backend {loading.backend}: `specdec compile` checks models for it, not this command")
    fits = {kind: fit for kind, path in paths.items() if (fit := _examined(kind, path, loading)) is not None}
    if len(fits) < len(paths) or (len(paths) > 1 and not _are_pair(paths["target"], paths["draft"])):
        return 1
    _show_memory(list(fits.values()), loading.num_slots)
    _show_speed(fits["target"], fits.get("draft"), settings.models)
    _show("serve", _command(settings))
    return 0


def _examined(kind: str, path: Path, loading: LoadingSettings) -> Fit | None:
    """Print how a model would be served, and return that as a `Fit`; if it would not be, print why, and return None."""
    from specdec.inference.text.tokenizer import Tokenizer

    try:
        fit = examine(loading.target(path, num_threads=usable_cores(), neuron=loading.neuron))
        Tokenizer.load(path)
        if kind == "target":
            DefaultSettings().of(path)
    except SpecDecError as error:
        _show(kind, f"NOT served: {error}")
        return None
    millions = fit.num_parameters / 1e6
    shown = f"{fit.architecture}, {millions:,.{0 if millions >= 1 else 2}f} million parameters"
    _show(kind, f"{shown}: served by our engine over backend {fit.backend} in {fit.dtype}: {fit.reason}")
    return fit


def _are_pair(target: Path, draft: Path) -> bool:
    """Print and return whether the draft fits the target: it has the same tokenizer, or enough of the same tokens."""
    from specdec.inference.text.tokenizer import Tokenizer
    from specdec.inference.text.vocabulary import Vocabulary, token_map

    try:
        words, theirs = Vocabulary.of(draft), Vocabulary.of(target)
        is_one = words.fingerprint == theirs.fingerprint
        if not is_one:
            tokenizers = Tokenizer.load(draft), Tokenizer.load(target)
            joined = token_map(tokenizers[0], words.size, tokenizers[1], min_share=MIN_VOCABULARY_SHARE)
            words = Vocabulary(theirs.fingerprint, tokenizers[1].num_ids, joined.num_shared)
    except SpecDecError as error:
        _show("pair", f"the draft does NOT fit: {error}")
        return False
    known = BUNDLED_SHARE if _is_bundled(target, draft) else "only a run shows it: specdec compare"
    share = f"it can propose {words.share_of(theirs.size):.2%} of the target's ids"
    tokens = "one tokenizer" if is_one else "two tokenizers"
    _show("pair", f"{tokens}: the draft fits, {share}; share of accepted draft tokens: {known}")
    return True


def _is_bundled(target: Path, draft: Path) -> bool:
    return (target.resolve(), draft.resolve()) == (BUNDLED_TARGET.resolve(), BUNDLED_DRAFT.resolve())


def _show_memory(fits: list[Fit], num_slots: int) -> None:
    weights = sum(fit.weight_bytes for fit in fits)
    slots = sum(fit.slot_bytes for fit in fits)
    needed, free = weights + num_slots * slots, available_memory()
    shown = f"{_size(weights)} of weights; {_size(slots)} a slot of {fits[0].max_length} tokens, {num_slots} slots"
    way = "" if needed < free else ": SHORT, take --dtype int8, or less of --batch or --sequence_length"
    _show("memory", f"{shown}: {_size(needed)} in all, {_size(free)} are available here{way}")


def _show_speed(target: Fit, draft: Fit | None, models: ExaminedModels) -> None:
    """Print the least time of a target's pass, which reads all weights once, and the most that a draft can gain."""
    meter = LoadMeter(usable_core_ids(), is_whole=True)
    bandwidth = _bandwidth(target.weight_bytes)
    if warning := meter.read().warning:
        _show("busy", warning)
    pass_s = target.weight_bytes / bandwidth
    rate = f"as many bytes as the target's weights are read at {bandwidth / 1e9:.1f} GB/s"
    way, most = ("or less", "or more") if warning else ("at least", "at most")
    least = f"a target pass takes {pass_s * 1e3:.1f} ms {way}, one stream has {1 / pass_s:.0f} tokens/s {most}"
    _show("speed", f"{rate}: {least}, without a draft")
    if draft is not None:
        cost = draft.weight_bytes / target.weight_bytes
        bounds = ", ".join(f"{bound(share, cost):.1f} at a share of {share}" for share in SHARES)
        measure = shlex.join(["specdec", "compare", *_flags_of(models)])
        _show("", f"with the draft at most so many times as fast: {bounds}; `{measure}` measures it")


def bound(share: float, cost: float) -> float:
    """Return the greatest speed-up over the target alone that a draft can give, by arXiv 2211.17192, theorem 3.8.

    It is that of the best number of draft tokens per pass, of at most `MAX_GAMMA`.

    Args:
        share: probability that a draft token is accepted, if those before it were.
        cost: time of a draft pass as a share of a target pass, which takes the same time for any number of tokens.
    """
    committed = ((1 - share ** (gamma + 1)) / (1 - share) for gamma in range(MAX_GAMMA + 1))
    return max(tokens / (1 + gamma * cost) for gamma, tokens in enumerate(committed))


def _bandwidth(num_bytes: int) -> float:
    """Return how many bytes per second this machine reads from a matrix of `num_bytes`, or `MAX_READ_BYTES` if less.

    The size matters, since a small model's weights stay in a cache, which is several times as fast as the memory. The
    matrix is read many times in parts, and the best time of each part counts: a part takes a millisecond or two, in
    which with luck no other process runs.
    """
    import numpy as np

    rows = max(1, min(num_bytes, MAX_READ_BYTES) // 4 // 4096)
    matrix, vector = np.ones((rows, 4096), np.float32), np.ones(4096, np.float32)
    parts = np.array_split(matrix, -(-matrix.nbytes // PART_BYTES))
    best_s, least_s, ends = [math.inf] * len(parts), math.inf, math.inf
    while time.perf_counter() < ends:
        for number, part in enumerate(parts):
            started = time.perf_counter()
            part @ vector
            best_s[number] = min(best_s[number], time.perf_counter() - started)
        if sum(best_s) < GAIN * least_s:
            least_s, ends = sum(best_s), time.perf_counter() + READING_S
    return matrix.nbytes / sum(best_s)


def _command(settings: DoctorSettings) -> str:
    """Return the command line that serves the examined models with the given settings."""
    models, loading = settings.models, settings.loading
    flags = ["--http_port", "8000", "--batch", str(loading.num_slots)]
    for flag, value in (("--dtype", loading.dtype), ("--backend", loading.backend), ("--device", loading.device)):
        flags += [flag, value] if value != "auto" else []
    flags += ["--sequence_length", str(loading.sequence_length)] if loading.sequence_length else []
    if models.draft in (None, NO_DRAFT):
        return shlex.join(["specdec", "target", "--model", str(models.target), *flags])
    return shlex.join(["specdec", "fused_target", *_flags_of(models), *flags])


def _flags_of(models: ExaminedModels) -> list[str]:
    return ["--target_model", str(models.target), "--draft_model", str(models.draft)]


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _show(what: str, text: str) -> None:
    print(f"{what:8}{text}", flush=True)
