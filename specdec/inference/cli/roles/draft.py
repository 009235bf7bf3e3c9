"""Role draft: the draft model completes prompts at the edge, serves clients there, or joins the pool of targets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specdec.inference.cli.models import NGRAM, DraftModel
from specdec.inference.cli.prompts.source import PromptSettings
from specdec.inference.cli.roles.compile import compile_ahead
from specdec.inference.config import (
    BRANCHES,
    BUNDLED_DRAFT,
    DEFAULT_BRANCHES,
    DEFAULT_SERVE_PORT,
    OPTIONAL_HTTP_PORT,
    ConnectionConfig,
    DraftConfig,
    HttpConfig,
    ObserveConfig,
    ProposerConfig,
    ServerConfig,
    targets,
)
from specdec.inference.errors import ConfigError, IncompatibleDraftError
from specdec.inference.settings import group, setting

SERVICE = "service (instead of prompts)"
OF_TARGETS = ("port", "lookup", "drafting", "prompt_share", "idle_timeout_s", "max_worker_slots", "pass_timeout_s")
"""Flags of `ServerConfig` that a draft worker lacks."""


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Settings of --role draft.

    Attributes:
        branches: in run-ahead, most branches prepared beside a chain, where the round trip makes them pay; each takes
            a slot of the draft model; 0 for none.
        attach: draft for these targets' sessions until stopped; dns:///NAME:PORT: all addresses of a name;
            file:///PATH: all of a list.
    """

    model: DraftModel = group(DraftModel)
    draft: DraftConfig = group(DraftConfig)
    branches: int = setting(DEFAULT_BRANCHES, "--branches N", section="link to the target", within=BRANCHES)
    prompts: PromptSettings = group(PromptSettings)
    serve: int | None = setting(
        None,
        "--serve PORT",
        help=f"serve clients on this port ({DEFAULT_SERVE_PORT} if none is named) instead of reading prompts; with "
        "--attach only the health service",
        section=SERVICE,
        bare=DEFAULT_SERVE_PORT,
    )
    server: ServerConfig | None = group(ServerConfig, SERVICE, needs=("serve", "attach"), without=OF_TARGETS)
    http: HttpConfig | None = group(HttpConfig, needs=("http_port",), port=OPTIONAL_HTTP_PORT)
    attach: str | None = setting(None, "--attach HOST:PORT[,...]", section="pool (instead of prompts)")
    observe: ObserveConfig = group(ObserveConfig, role="draft")


async def run(settings: DraftSettings) -> int:
    try:
        return await _run(settings)
    except IncompatibleDraftError as exc:
        if Path(settings.model.path) != BUNDLED_DRAFT:
            raise
        ways = f"--model DIR, a smaller model with the target's tokenizer; --model {NGRAM} --tokenizer DIR, no model"
        message = f"{exc.message}; the draft is the bundled one, and there are: {ways}"
        raise IncompatibleDraftError(message, address=exc.address) from exc


async def _run(settings: DraftSettings) -> int:
    proposer = proposer_config(settings)
    if settings.model.loading.only_compiles:
        return await compile_ahead(None, proposer.model_with_branches)
    if settings.server is None:
        return await _complete(settings, proposer)
    server = replace(settings.server, port=settings.serve or 0)
    if settings.attach is not None:
        return await _attach(settings, settings.attach, proposer, server)

    from specdec.inference.serving.draft import serve_draft

    draft = replace(settings.draft, max_waiting=server.max_waiting)
    await serve_draft(proposer, draft, server, settings.http, settings.observe)
    return 0


def proposer_config(settings: DraftSettings) -> ProposerConfig:
    """Return the configuration of the draft, with branches if it runs ahead and its backend can fork slots."""
    from specdec.inference.backends.registry import CANNOT_FORK

    config = settings.model.config()
    runs_ahead = settings.attach is not None or settings.draft.schedule.runs_ahead
    if not runs_ahead or settings.model.loading.backend in CANNOT_FORK:
        return config
    return replace(config, branches=settings.branches)


async def _complete(settings: DraftSettings, proposer: ProposerConfig) -> int:
    job = settings.prompts.job(
        concurrency=settings.model.loading.num_slots,
        observe=settings.observe,
        gamma=settings.draft.gamma,
        deadline_s=settings.draft.connection.deadline_s,
    )

    from specdec.inference.cli.prompts.topologies import run_draft

    if proposer.tokenizer_path == BUNDLED_DRAFT:  # else each prompt reports it
        await _require_fit(settings.draft.connection, proposer.tokenizer_path)
    return await run_draft(job, proposer, replace(settings.draft, max_waiting=len(job.prompts)))


async def _require_fit(connection: ConnectionConfig, draft: Path) -> None:
    """Raise IncompatibleDraftError if the target has another tokenizer than the draft, before a model is loaded."""
    from specdec.inference.text.vocabulary import Vocabulary, require_one_vocabulary
    from specdec.inference.workers.calls.fleet import connected
    from specdec.inference.workers.completing.remote import card_of_target

    async with connected(connection) as fleet:
        card = await card_of_target(fleet)
    if card is not None:
        require_one_vocabulary(Vocabulary.of(draft), Vocabulary(card.tokenizer_fingerprint, card.vocab_size))


async def _attach(settings: DraftSettings, attach: str, proposer: ProposerConfig, server: ServerConfig) -> int:
    if not (attached := targets(attach)):
        raise ConfigError("--attach names no target")
    for flag, given in (("--profile", settings.observe.profile), ("--http_port", settings.http is not None)):
        if given:
            raise ConfigError(f"{flag} with --attach: the requests live at the target; give it there")
    security = settings.draft.connection.security
    for where in attached:
        security.check(where)

    from specdec.inference.serving.draft import help_targets

    await help_targets(
        proposer,
        attached,
        server,
        settings.observe,
        gamma=settings.draft.gamma,
        security=security,
        reports_health=settings.serve is not None,
    )
    return 0
