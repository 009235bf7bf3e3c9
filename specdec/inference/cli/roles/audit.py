"""Role audit: asks any server of this project whether an output is its model's own choice, token by token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from specdec.inference.cli.prompts.source import PromptSettings, text_of
from specdec.inference.config import SERVICE_FLAGS, ConnectionConfig, ObserveConfig
from specdec.inference.errors import ConfigError
from specdec.inference.settings import FINITE, Range, group, setting
from specdec.inference.workers.completing.audit import NEAR_TIE, Audit

SECTION = "audit"


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """Settings of --role audit, which asks a server whether an output is its model's own choice, token by token.

    Attributes:
        output_text: a UTF-8 file with the text that followed the prompt.
        output_ids: the output as token ids, such as 5,17,3, since several sequences of tokens can give one text.
        near_tie: margin up to which rounding may have decided.
    """

    connection: ConnectionConfig = group(ConnectionConfig)
    prompts: PromptSettings = group(PromptSettings, without=("max_new_tokens", "stop"))
    output_text: Path | None = setting(None, "--output_text FILE", section=SECTION, exclusive=True)
    output_ids: str | None = setting(None, "--output_ids ID[,...]", section=SECTION, exclusive=True)
    near_tie: float = setting(NEAR_TIE, "--near_tie X", section=SECTION, within=Range(0.0, FINITE))
    observe: ObserveConfig = group(ObserveConfig, role="audit", without=(*SERVICE_FLAGS, "trace", "profile"))


async def run(settings: AuditSettings) -> int:
    """Print whether each token of the output is the model's own choice; return 0 if all are, else 1.

    Raises:
        ConfigError: there is not exactly one prompt, or no output.
    """
    job = settings.prompts.job(concurrency=1, observe=settings.observe)
    if len(job.prompts) != 1:
        raise ConfigError(f"an audit is of one --prompt, {len(job.prompts)} are given")
    output = _output(settings)

    from dataclasses import replace

    from specdec.inference.serving.edge import edge
    from specdec.inference.workers.completing.audit import audited

    async with edge(settings.connection) as servers:
        request = replace(job.template, prompt=job.prompts[0])
        done = await audited(servers.completer, servers.remote, request, output, settings.near_tie)
    _show(done, job.format)
    return int(not done.holds)


def _output(settings: AuditSettings) -> str | tuple[int, ...]:
    if settings.output_text is not None:
        return text_of(settings.output_text, "--output_text")
    if (text := settings.output_ids) is None:
        raise ConfigError("an audit needs the output: --output_text FILE or --output_ids ID,ID")
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError as exc:
        raise ConfigError(
            f"--output_ids {text[:80]!r} is not valid: token ids with commas between them, 5,17,3"
        ) from exc


def _show(audit: Audit, format_: str) -> None:
    if format_ == "json":
        print(json.dumps(audit.as_json()))
        return
    if format_ == "tokens":
        for i, each in enumerate(audit.tokens):
            said = "choice" if each.is_choice else f"not the choice {each.choice}: margin {each.margin:.4g}"
            print(f"{i}\t{each.token_id}\t{said}")
    print(audit.verdict)
