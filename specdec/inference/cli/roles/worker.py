"""Role worker: a draft worker in the pools of targets, which drafts for the requests of all their clients."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from specdec.inference.cli.roles.compile import compile_ahead
from specdec.inference.config import (
    BRANCHES,
    BUNDLED_DRAFT,
    DEFAULT_BRANCHES,
    OF_MODELS,
    DialSecurity,
    DraftConfig,
    ObserveConfig,
    ProposerConfig,
    ServerConfig,
    optional_grpc_port,
    targets,
)
from specdec.inference.errors import ConfigError, IncompatibleDraftError
from specdec.inference.serving.models import NGRAM, DraftModel
from specdec.inference.settings import REQUIRED, group, same, setting


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of --role worker, which drafts for the requests of all clients of targets.

    Attributes:
        attach: draft for these targets' sessions until stopped; dns:///NAME:PORT: all addresses of a name;
            file:///PATH: all of a list.
        branches: in run-ahead, most branches prepared beside a chain, where the round trip makes them pay; each takes
            a slot of the draft model; 0 for none.
    """

    attach: str = setting(REQUIRED, "--attach HOST:PORT[,...]", section="targets")
    security: DialSecurity = group(DialSecurity)
    model: DraftModel = group(DraftModel)
    gamma: int = same(DraftConfig, "gamma")
    branches: int = setting(DEFAULT_BRANCHES, "--branches N", section="speculation", within=BRANCHES)
    server: ServerConfig = group(
        ServerConfig,
        without=("max_waiting", "drain", "drain_delay_s", "grace_s", *OF_MODELS),
        port=optional_grpc_port("report health over gRPC"),
    )
    observe: ObserveConfig = group(ObserveConfig, role="worker", without=("profile",))


async def run(settings: WorkerSettings) -> int:
    with ways_out(settings.model):
        return await _run(settings)


async def _run(settings: WorkerSettings) -> int:
    proposer = with_branches(settings.model, settings.branches)
    if settings.model.loading.only_compiles:
        return await compile_ahead(None, proposer.model_with_branches)
    if not (attached := targets(settings.attach)):
        raise ConfigError("--attach names no target")
    for where in attached:
        settings.security.check(where)

    from specdec.inference.serving.worker import serve_worker

    await serve_worker(
        proposer, attached, settings.server, settings.observe, gamma=settings.gamma, security=settings.security
    )
    return 0


def with_branches(model: DraftModel, branches: int) -> ProposerConfig:
    """Return the configuration of a draft that runs ahead, with `branches` branches if its backend can copy slots.

    Branches are alternatives to the likeliest continuation; each sequence has at most that many.
    """
    from specdec.inference.backends.registry import CANNOT_FORK

    config = model.config()
    return config if model.loading.backend in CANNOT_FORK else replace(config, branches=branches)


@contextmanager
def ways_out(model: DraftModel) -> Generator[None, None, None]:
    """Add to an IncompatibleDraftError of the block which drafts to use instead, if `model` is the bundled draft."""
    try:
        yield
    except IncompatibleDraftError as exc:
        if Path(model.path) != BUNDLED_DRAFT:
            raise
        ways = f"--model DIR, a smaller model with the target's tokenizer; --model {NGRAM} --tokenizer DIR, no model"
        message = f"{exc.message}; the draft is the bundled one, and there are: {ways}"
        raise IncompatibleDraftError(message, address=exc.address) from exc
