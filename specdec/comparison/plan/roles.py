"""Flags with which to start main.py's roles (kinds of processes) for one of the compared ways to serve.

The flags are written as command lines, and as the text of a --config file.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from specdec.comparison.plan.backend import AUTO, NEURON, BackendConfig
from specdec.comparison.plan.config import ComparisonConfig, Contender, Topology
from specdec.inference.serving.models import NGRAM

MARGIN = 1.05
"""Least speed-up for which a draft is advised: below it the target alone is, since a draft is one more thing to run."""
TIE = 0.95
"""Share of the best speed-up from which ways to serve count as equally fast, so that the simplest is advised."""
Table = dict[str, str | int | bool]
"""Flags of one role without their dashes, with their values."""


def service_toml(config: ComparisonConfig, contender: Contender | None, reason: str) -> str:
    """Return the text of a --config file with which to serve as a contender does.

    Args:
        contender: way to serve; None is the target alone, without lookup.
        reason: why this way is advised; the text has it as a comment.
    """
    lines = [f"# {line}" for line in ("Written by specdec study.", reason, _ADDRESSES)]
    for role, table in _roles(config, contender).items():
        lines += ["", f"[{role}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def commands(config: ComparisonConfig, contender: Contender | None) -> list[str]:
    """Return the command lines with which to serve as a contender does, the target's first.

    Args:
        contender: way to serve; None is the target alone, without lookup.
    """
    roles = _roles(config, contender)
    if contender is not None and contender.topology.is_split:
        at_edge: Table = {"target_host": "HOST", "serve": 50052}
        roles["draft"] |= {"attach": "HOST:50051"} if contender.topology is Topology.POOL else at_edge
    return [" ".join(["specdec", role, *map(_flag, table.items())]) for role, table in roles.items()]


def _flag(setting: tuple[str, str | int | bool]) -> str:
    name, value = setting
    return f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}"


_ADDRESSES = "Addresses are yours: --target_host of an edge draft, --attach of a pool's worker, --host of a server."


def _roles(config: ComparisonConfig, contender: Contender | None) -> dict[str, Table]:
    target = str(config.target_model.resolve())
    backend = config.backend
    on = _backend_flags(backend)
    alone: Table = {"model": target, **on}
    if contender is None:
        return {"target": {**alone, "no-lookup": True}}
    if contender.topology is Topology.TARGET:
        return {"target": alone}
    draft, gamma = _draft(contender), contender.gamma or 0
    if contender.topology is Topology.FUSED:
        fixed = {"no-adaptive_gamma": True} if len(config.gammas) > 1 else {}  # as it was measured
        length = gamma + backend.one_graph(draft)  # one graph counts the target's token too
        return {"fused_target": {"target_model": target, "draft_model": draft, "gamma": length, **fixed, **on}}
    table: Table = {"model": draft, "tokenizer": target, "gamma": gamma}
    table |= {"backend": backend.draft_name} if backend.draft_name != AUTO and draft != NGRAM else {}
    table |= {"dtype": backend.draft_dtype} if backend.draft_dtype and draft != NGRAM else {}
    table |= {"schedule": contender.schedule.value} if contender.schedule else {}
    table |= {} if contender.branches is None else {"branches": contender.branches}
    return {"target": alone, "draft": table}


def _backend_flags(backend: BackendConfig) -> Table:
    names = ["name"] if backend.name != AUTO else []
    names += ["dtype", "tp_degree", "sequence_length", "neuron_config"] if backend.name == NEURON else []
    flags = {"backend" if name == "name" else name: getattr(backend, name) for name in names}
    flags |= {"device_sampling": True} if backend.device_sampling else {}
    return {name: value for name, value in flags.items() if value is not None}


def _draft(contender: Contender) -> str:
    draft = contender.draft or NGRAM
    return draft if draft == NGRAM else str(Path(draft).resolve())
