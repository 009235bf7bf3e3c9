"""vLLM's own flags, given after `--`: refusals before vLLM is imported, and vLLM's configuration made of them.

An import takes ten seconds and a start a minute, so a wrong flag must fail before. Names of flags are read in vLLM's
sources, as text. The dotted names of this package's classes that vLLM's processes import stand here.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from specdec.inference.config import DEFAULT_GAMMA, model_name
from specdec.inference.errors import ConfigError
from specdec.inference.request import Noise
from specdec.inference.vllm.grammars import take_own_grammars
from specdec.inference.vllm.hooks import VARIABLE, installed, read_hooks
from specdec.inference.vllm.refusals import in_brief, refusals
from specdec.inference.vllm.translation import KEY, METHOD, SOCKET

logger = logging.getLogger(__name__)

HOOKS = {
    "vllm.engine.arg_utils:AsyncEngineArgs": (
        "add_cli_args from_cli_args create_engine_config async_scheduling "
        "scheduler_cls worker_cls speculative_config generation_config served_model_name"
    ),
    "vllm.config.vllm:VllmConfig": (
        "use_v2_model_runner additional_config model_config parallel_config device_config structured_outputs_config"
    ),
    "vllm.config.model:ModelConfig": "logprobs_mode is_hybrid is_attention_free",
    "vllm.config.structured_outputs:StructuredOutputsConfig": "backend",
}
"""Fields of vLLM's configuration that are set or read."""
OURS: Mapping[str, str] = {
    "--model": "--model before the `--` names the model",
    "--tokenizer": "the model's own tokenizer is read",
    "--skip-tokenizer-init": "text is made outside of vLLM",
    "--served-model-name": "--served_model_name of the gateway names it",
    "--speculative-config": "draft workers of ours propose, or --draft_model before the `--`",
    "--spec-method": "draft workers of ours propose, or --draft_model before the `--`",
    "--scheduler-cls": "the scheduler is ours",
    "--worker-cls": "the worker is ours",
    "--worker-extension-cls": "the worker is ours",
    "--logits-processors": "the choice of tokens is ours: bias, penalties and grammars are fields of a request",
    "--async-scheduling": "draft tokens that have arrived are given to the next pass: leave it out",
    "--additional-config": "it carries our own settings",
    "--host": "--host before the `--` does",
    "--port": "--port before the `--` does",
    "--api-key": "--auth_file before the `--` names the callers",
    "--generation-config": "--generation_config before the `--` does",
}
"""Flags of vLLM that users cannot set here, each with the reason or with the flag to use instead."""
ADAPTERS = "--lora-modules"
"""Flag for LoRA adapters, which vLLM's own server has and its engine has not."""
INVARIANT = "VLLM_BATCH_INVARIANT"
"""Variable that lets vLLM compute a row with the same bits whatever else its pass has."""
PACKAGE = __name__.rpartition(".")[0]
WORKER = f"{PACKAGE}.worker.Worker"
"""Dotted name of this project's class for vLLM's workers, which extends vLLM's own class for the platform."""
_FLAG = re.compile(r'"(--[a-z][a-z0-9-]+)"')


@dataclass(frozen=True, slots=True)
class VllmModel:
    """Model that vLLM serves.

    Attributes:
        path: directory of the model.
        flags: vLLM's own flags.
        gamma: most draft tokens of a request in a pass, which vLLM makes room for.
        noise: rule by which a seed gives the random numbers of a choice of tokens (docs/noise.md), for all requests;
            None: that of vLLM's runner, see `noise_of`.
        draft: draft model or head of vLLM's own speculator, in the place of draft workers; None without one.
        method: method of that speculator.
    """

    path: Path
    flags: Sequence[str] = ()
    gamma: int = DEFAULT_GAMMA
    noise: Noise | None = None
    draft: str | None = None
    method: str = METHOD


def check_flags(flags: Sequence[str]) -> None:
    """Refuse flags that vLLM lacks or that only this project may set, and a missing vLLM; import nothing of vLLM.

    Raises:
        ConfigError: names the flag, or the names that this vLLM lacks, and the way out.
    """
    hooks = read_hooks()
    if hooks is None:
        raise ConfigError("--engine vllm: vllm is not installed here; take vLLM's own environment (docs/vllm.md)")
    if not hooks.usable:
        raise ConfigError(f"vLLM {installed()} lacks names that specdec needs: `specdec vllm_check` shows them")
    known = _known_flags(hooks.place)
    adapters_of(flags)
    for flag in flags:
        if flag == "-" or not flag.startswith("-"):
            continue
        name = flag.partition("=")[0].partition(".")[0].replace("_", "-")
        if (reason := OURS.get(name)) is not None:
            raise ConfigError(f"{flag} after --: {reason}")
        if name == ADAPTERS:
            continue
        if known and name not in known and name.replace("--no-", "--", 1) not in known and name.startswith("--"):
            near = get_close_matches(name, known, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"vLLM {installed()} has no flag {flag}{meant}")


def adapters_of(flags: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """Return the directory of each adapter that vLLM's flags name, by the adapter's name, and the other flags.

    Raises:
        ConfigError: an adapter is not NAME=DIR, or vLLM's JSON for it, or its directory has no adapter.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(ADAPTERS, "--lora_modules", nargs="+", default=[])
    parsed, others = parser.parse_known_args(flags)
    adapters: dict[str, Path] = {}
    for module in parsed.lora_modules:
        try:
            values = json.loads(module) if module.startswith("{") else None
            name, path = module.split("=", 1) if values is None else (values["name"], values["path"])
        except (ValueError, KeyError) as exc:
            raise ConfigError(f"{ADAPTERS} {module}: NAME=DIR is expected, or JSON with name and path") from exc
        adapters[name] = Path(path)
        if not (adapters[name] / "adapter_config.json").is_file():
            raise ConfigError(
                f"{ADAPTERS} {module}: {path} has no adapter_config.json, so it is not an adapter's directory"
            )
    return adapters, others


def _known_flags(package: Path) -> set[str]:
    """Return the flags that vLLM's `arg_utils.py` defines; an empty set if this version has no such file."""
    file = package / "engine" / "arg_utils.py"
    return set(_FLAG.findall(file.read_text(encoding="utf-8"))) if file.is_file() else set()


def is_invariant() -> bool:
    """Return whether vLLM is asked to compute rows with the same bits in every pass."""
    return os.environ.get(INVARIANT, "0") not in ("", "0")


def prepare_environment(log_level: str, exact: str = "auto") -> None:
    """Set what vLLM reads when it is imported, such as a log of warnings on stderr.

    Args:
        log_level: log level of this process; with "debug", vLLM logs from level INFO on, else from WARNING on.
        exact: "always" asks vLLM for rows with the same bits in every pass; else the operator's environment decides.
    """
    if exact == "always":
        os.environ[INVARIANT] = "1"
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork would copy this process's open sockets
    os.environ["VLLM_LOGGING_STREAM"] = f"ext://{PACKAGE}.refusals.log"
    if sys.stderr.isatty():
        os.environ.setdefault("VLLM_LOGGING_COLOR", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if log_level == "debug" else "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Python's tracker of shared memory removes what vLLM leaves, and warns of it at every end.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")


def engine_config(model: VllmModel) -> Any:
    """Return vLLM's configuration of an engine with this package's scheduler and worker; imports vLLM.

    Raises:
        ConfigError: vLLM refuses a flag or a value, or would use a feature that `require_kept` refuses.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"vLLM {installed()}: {in_brief(message)}")

    adapters, flags = adapters_of(model.flags)
    parsed = AsyncEngineArgs.add_cli_args(Parser(add_help=False)).parse_args(["--model", str(model.path), *flags])
    args = AsyncEngineArgs.from_cli_args(parsed)
    if adapters and not args.enable_lora:
        raise ConfigError(f"{ADAPTERS}: adapters need --enable-lora too")
    args.generation_config = "vllm"
    args.served_model_name = model_name(model.path)  # in vLLM's metrics, as in ours
    for name, value in parts(model.gamma, model.method, model.draft).items():
        setattr(args, name, value)
    with refusals(flags):
        config = args.create_engine_config()
    require_usable(config)
    require_kept(config, model.method)
    noise_of(config, model.noise)
    take_own_grammars()
    config.structured_outputs_config.backend = "guidance"
    if config.use_v2_model_runner:
        import vllm_same_text

        vllm_same_text.permit()
    else:
        os.environ.setdefault("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    return config


def noise_of(config: Any, asked: Noise | None) -> Noise:
    """Return the rule by which a seed gives random numbers: vLLM's own on runner V2, the one asked for on runner V1.

    Args:
        config: vLLM's configuration, which says the runner.
        asked: rule that the operator asks for; None leaves it to the runner, and on V1 is this project's own.

    Raises:
        ConfigError: another one is asked for on runner V2.
    """
    law = Noise.VLLM if config.use_v2_model_runner else asked or Noise.SPECDEC
    if asked not in (None, law):
        way = f"leave it out, or set {VARIABLE}=0 for runner V1"
        raise ConfigError(f"--noise {asked} is not valid on vLLM's runner V2, which draws by its own: {way}")
    return law


def require_usable(config: Any) -> None:
    """Raise ConfigError, which names the way out, if vLLM has chosen a model runner that this package cannot use.

    The other runner is not taken instead: it gives other texts, so streams of other servers could not continue here.
    """
    runner, hooks = "V2" if config.use_v2_model_runner else "V1", read_hooks()
    if hooks is not None and hooks.missing[runner]:
        way = "`specdec vllm_check` shows all that is missing"
        if runner == "V2" and not hooks.missing["V1"]:
            way = f"add that, or set {VARIABLE}=0 for runner V1, whose texts are others"
        raise ConfigError(f"runner {runner} of vLLM {installed()} lacks {hooks.missing[runner][0]}: {way}")


def parts(gamma: int, method: str = METHOD, draft: str | None = None) -> dict[str, Any]:
    """Return the fields of vLLM's configuration that put this package's scheduler and worker into its engine.

    Args:
        gamma: most draft tokens of a request in a pass.
        method: speculation method. Without one a runner verifies nothing; with `METHOD` draft workers propose.
        draft: draft model or head of another method; None without one.
    """
    own = {} if draft is None else {"model": draft}
    return {
        "async_scheduling": False,
        "scheduler_cls": f"{PACKAGE}.scheduler.DraftScheduler",
        "worker_cls": WORKER,
        "speculative_config": {"method": method, "num_speculative_tokens": max(1, gamma), **own},
    }


def serve_parts(gamma: int, mailbox: Path | None, noise: str | None = None) -> dict[str, Any]:
    """Return settings with which vLLM's own server uses a pool's draft workers: `parts`, and the pool's mailbox.

    Args:
        gamma: most draft tokens of a request in a pass.
        mailbox: folder in which the pool is found; None: that of the server's user.
        noise: rule by which a seed gives the random numbers of a choice of tokens (docs/noise.md), for all requests;
            None: that of vLLM's runner.
    """
    place = {"owned": False, "path": "" if mailbox is None else str(mailbox.absolute() / SOCKET)}
    place |= {} if noise is None else {"noise": noise}
    return {**parts(gamma), "additional_config": {KEY: place}}


def require_kept(config: Any, wanted: str = METHOD) -> None:
    """Check that no feature which vLLM would use makes tokens depend on drafts; log a warning where rounding may.

    Args:
        wanted: speculation method that the configuration must have.

    Raises:
        ConfigError: names the setting, and what to do.
    """
    model, speculation = config.model_config, config.speculative_config
    method, is_cpu = None if speculation is None else speculation.method, config.device_config.device_type == "cpu"
    faults = {
        f"speculation method {method}: its drafts would never be asked for; leave --speculative-config to us": (
            method != wanted
        ),
        f"model {model.model}: layers with a state (Mamba and others) give wrong text on V1, and are untried on V2": (
            model.is_hybrid or model.is_attention_free
        ),
        "async scheduling: --no-async-scheduling after --": config.scheduler_config.async_scheduling,
        "a model that writes no text by decoding": model.runner_type != "generate",
        f"{INVARIANT}=1 on a CPU, where every pass fails with it: unset it": is_cpu and is_invariant(),
    }
    for fault, is_found in faults.items():
        if is_found:
            raise ConfigError(f"vLLM {installed()} would run {fault}")
    for fault in _rule_of(config).faults(config):
        raise ConfigError(f"vLLM {installed()}: {fault}")
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype in ("bfloat16", "float16") and not is_invariant():
        lost = "tokens may depend on drafts and on other requests by rounding"
        logger.warning("%s in %s: %s; on a GPU --exact always prevents it (docs/vllm.md)", model.model, dtype, lost)


def _rule_of(config: Any) -> ModuleType:
    """Return the module by which tokens are chosen.

    That is `vllm_same_text` on runner V2 and if vLLM's own speculator drafts, else this package's `runner_v1`.
    """
    if config.use_v2_model_runner or config.speculative_config.method != METHOD:
        import vllm_same_text

        return vllm_same_text
    from specdec.inference.vllm import runner_v1

    return runner_v1
