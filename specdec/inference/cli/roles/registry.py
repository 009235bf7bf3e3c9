"""Registry of the roles: the summary and the function of each value of --role, and the parser of its flags."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from specdec.inference.cli.config_file import ConfigFileParser, program
from specdec.inference.cli.flags import add_group
from specdec.inference.cli.roles import (
    alone,
    artifacts,
    audit,
    chat,
    compile,
    demo,
    doctor,
    draft,
    fused_client,
    fused_target,
    gateway,
    pool,
    rescale_fp8,
    target,
    token,
    vllm_check,
    vllm_config,
    worker,
)
from specdec.inference.declared import read


@dataclass(frozen=True, slots=True)
class Role:
    """Role of a process, which is a value of --role.

    Attributes:
        summary: sentence about the role for --help.
        run: function that runs the role with its settings and returns the exit code; its module imports no slow library
            before that.
    """

    summary: str
    run: Callable[[Any], Coroutine[Any, Any, int]]

    @property
    def settings(self) -> type[Any]:
        """Return the class of the role's settings, a dataclass that declares its flags; one field is `observe`."""
        return get_type_hints(self.run)["settings"]  # type: ignore[no-any-return]


ROLES = {
    "demo": Role("Show the service at work, in a minute; `demo failover` kills a server.", demo.run),
    "doctor": Role("Report whether models would be served, how, and how fast.", doctor.run),
    "target": Role("Serve the target to draft workers, and to clients without any draft.", target.run),
    "draft": Role("Draft here, verify at a target: complete prompts, or --serve clients.", draft.run),
    "worker": Role("Draft for the requests of all clients of targets.", worker.run),
    "fused_target": Role("Serve both models from one process.", fused_target.run),
    "fused_client": Role("Complete prompts at any of our servers.", fused_client.run),
    "chat": Role("Talk with a server in the terminal: ours, or any with OpenAI's API.", chat.run),
    "gateway": Role("Serve OpenAI's HTTP API, and gRPC, in front of any of our servers.", gateway.run),
    "pool": Role("Lend draft workers to `vllm serve`, which stands beside it.", pool.run),
    "vllm_config": Role("Print what `vllm serve` takes to be helped by a pool.", vllm_config.run),
    "audit": Role("Check whether a text is a model's own choice, token by token.", audit.run),
    "compile": Role("Compile models ahead of time for backend neuron.", compile.run),
    "artifacts": Role("List, verify, clean or await a folder of compiled models.", artifacts.run),
    "rescale_fp8": Role("Make a public fp8 checkpoint one for Neuron.", rescale_fp8.run),
    "token": Role("Make a token for the auth file of servers.", token.run),
    "vllm_check": Role("Report whether the installed vLLM can be a target's engine.", vllm_check.run),
    "verify_target": Role("Run the target alone, here.", alone.run),
    "verify_fused": Role("Run both models in one process, here.", alone.run_fused),
    "verify_draft": Role("Run the draft alone, here.", alone.run_draft),
}


def settings_of(name: str, arguments: Sequence[str]) -> Any:
    """Return the settings that a role's arguments describe, an instance of its `Role.settings`.

    Raises:
        ConfigError, InvalidRequestError: a value is out of range.
        SystemExit: --help, or a flag that does not exist.
    """
    return read(ROLES[name].settings, vars(parser_of(name).parse_args(arguments)))


def parser_of(name: str) -> ConfigFileParser:
    """Return the parser of one role's flags."""
    role = ROLES[name]
    parser = ConfigFileParser(
        role=name,
        roles={each: lambda each=each: parser_of(each) for each in ROLES},  # type: ignore[misc]
        prog=program(name, f"main.py --role {name}"),
        description=role.summary,
        allow_abbrev=False,
    )
    add_group(parser, role.settings)
    return parser
