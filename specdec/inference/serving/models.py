"""Settings of the models that a role (a value of --role) loads, and the configurations that are made of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from specdec.inference.backends.registry import COMPILERS
from specdec.inference.checkpoint_files import CheckpointFiles
from specdec.inference.config import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    COMPILE_POLICIES,
    DEFAULT_GAMMA,
    FUSED_GAMMA,
    MTP,
    NEURON,
    NOT_EMULATED,
    SPECULATION_METHODS,
    Emulation,
    FusedConfig,
    Loading,
    ModelConfig,
    NeuronOptions,
    ProposerConfig,
    usable_cores,
)
from specdec.inference.errors import ConfigError, InvalidRequestError
from specdec.inference.request import Noise, RequestDefaults
from specdec.inference.serving.hub import OF_TOKENIZERS, WANTED, is_hub_id, model_directory
from specdec.inference.settings import described, group, same, setting

logger = logging.getLogger(__name__)

SettingsT = TypeVar("SettingsT", bound=Any)
NGRAM = "ngram"
"""Name that users give in place of a draft model, to look draft tokens up in the sequence itself (prompt lookup)."""
VLLM = "vllm"
NO_DRAFT = "none"
"""Name that users give in place of a draft model, for a target without a draft."""
DRAFT_TEXT = f"draft model directory, or {NGRAM} to look drafts up in the sequence itself"

PAIR = {"target": "revision", "draft": "draft_revision"}
"""Value of `Models.REVISIONS` for a target and its draft: each model's field, with the field of its revision."""


@cache
def _warn_unsharded(tp_degree: int, backend: str) -> None:
    """Log a warning that `--tp_degree` has no effect; only once, although each model of a pair has its own options."""
    logger.warning("tp_degree %d has no effect: backend %s does not shard a model", tp_degree, backend)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingSettings(Loading):
    """Settings of a role for loading its models.

    Attributes:
        emulation: let each pass sleep until it has taken this long, as on an accelerator: target:25ms,draft:3ms, or
            one of the two; target:25ms+1ms/session+0.1ms/token grows with the sessions and, beyond 250 tokens, with
            the tokens of a pass.
        speculation_method: vanilla (default): any sampling; others: NxDI's graph drafts and verifies (default of
            fused_target: fused); medusa: needs no draft model. With --engine vllm its own speculators: fused (default
            where there is a --draft_model), eagle, eagle3, mtp.
    """

    emulation: Emulation = setting(NOT_EMULATED, "--emulate PASSES")
    speculation_method: str | None = setting(None, "--speculation_method", choices=SPECULATION_METHODS, section=NEURON)

    def target(self, path: Path, *, num_threads: int, neuron: NeuronOptions) -> ModelConfig:
        """Return the configuration of a target in the directory `path`.

        Args:
            num_threads: threads of a pass, unless the settings have a number.
            neuron: options for Neuron devices.
        """
        values = {each.name: getattr(self, each.name) for each in fields(Loading)}
        values |= {"num_threads": self.num_threads or num_threads, "neuron": neuron}
        return ModelConfig(path, pass_time=self.emulation.target, **values)

    def proposer(self, draft: str, *, tokenizer: Path, num_threads: int, neuron: NeuronOptions) -> ProposerConfig:
        """Return the configuration of a draft.

        Args:
            draft: directory of the draft model, or "ngram" for prompt lookup.
            tokenizer: directory of the tokenizer in whose tokens it drafts.
            num_threads: threads of a pass, unless the settings have a number.
            neuron: options for Neuron devices.
        """
        if draft == NGRAM:
            return ProposerConfig(tokenizer, None, self.num_slots)
        model = self.target(Path(draft), num_threads=num_threads, neuron=neuron)
        return ProposerConfig(tokenizer, replace(model, pass_time=self.emulation.draft), self.num_slots)

    def neuron_options(
        self, *, gamma: int = 0, method: str | None = None, tp_degree: int | None = None
    ) -> NeuronOptions:
        """Return the options of a model on Neuron devices.

        Args:
            gamma: draft tokens that a compiled verification pass has room for; 0 for a draft, or a model alone.
            method: speculation method in place of the settings'; None: the settings'.
            tp_degree: number of cores in place of the settings'; None: the settings'.

        Raises:
            ConfigError: the settings ask for something that the backend does not have.
        """
        method = method or self.speculation_method or "vanilla"
        if method == MTP:
            raise ConfigError(f"--speculation_method {MTP} is not valid here: it needs --engine {VLLM}")
        options = replace(self.neuron, gamma=gamma, method=method, tp_degree=tp_degree or self.neuron.tp_degree)
        if "neuron" not in self.backend:
            self._check_other_backend(options)
        return options

    def _check_other_backend(self, options: NeuronOptions) -> None:
        if options.tp_degree > 1:
            _warn_unsharded(options.tp_degree, self.backend)
        compiles = self.compile_policy != COMPILE_POLICIES[0] and self.backend not in COMPILERS
        if options.method != "vanilla" or options.overrides or options.device_sampling or compiles:
            neither = "--speculation_method, --neuron_config, --device_sampling nor --compile"
            raise ConfigError(f"backend {self.backend} takes neither {neither}")

    def method_of_pair(self, *, has_draft: bool) -> str | None:
        """Return the speculation method of a target: that of the flag, else "fused" on neuron if it has a draft.

        None stands for the default, vanilla.
        """
        if self.speculation_method is None and self.backend == "neuron" and has_draft:
            return "fused"
        return self.speculation_method

    @property
    def only_compiles(self) -> bool:
        """Return whether the role only compiles its models, and then ends."""
        return self.compile_policy == "only"


@dataclass(frozen=True, slots=True)
class Models:
    """Base class of settings that name models, each by its directory or by its hub id.

    `REVISIONS` maps each field that names a model to the field with its revision, or to None.
    """

    REVISIONS: ClassVar[Mapping[str, str | None]] = {}

    def fetched(self) -> Self:
        """Return the settings with a local directory in place of each hub id, after a download of what the cache lacks.

        Raises:
            ConfigError: a model is gated, missing or unreachable, or a revision is given without a hub id.
        """
        fetched = {}
        unused = {name for name in self.REVISIONS.values() if name is not None and getattr(self, name) is not None}
        for field, name in self.REVISIONS.items():
            model, revision = getattr(self, field), name and getattr(self, name)
            if model is not None and is_hub_id(str(model)):
                wanted = OF_TOKENIZERS if field == "tokenizer" else WANTED
                fetched[field] = type(model)(model_directory(str(model), revision, wanted))
                unused.discard(name or "")
        for name in unused:
            raise ConfigError(
                f"--{name} {getattr(self, name)}: no model is named by a hub id, and directories have none"
            )
        return replace(self, **fetched)

    def require_readable(self) -> None:
        """Raise ConfigError if a model's files show that no backend can read it; nothing is loaded."""
        loading: LoadingSettings | None = getattr(self, "loading", None)
        if loading is None or "neuron" in loading.backend:  # which has formats of its own
            return
        for field in self.REVISIONS.keys() - {"tokenizer"}:
            if (model := getattr(self, field)) is not None and str(model) != NGRAM:
                files = CheckpointFiles(Path(model))
                files.require_weights()
                files.require_tokenizer()


@dataclass(frozen=True, slots=True)
class OneModel(Models):
    """Settings of one model, by default the target.

    Attributes:
        path: target model directory.
        revision: branch, tag or commit of a model that is named by its hub id (NAMESPACE/NAME instead of DIR).
    """

    SECTION: ClassVar = "model"
    REVISIONS: ClassVar = {"path": "revision"}

    path: Path = setting(BUNDLED_TARGET, "--model --target_model DIR")
    revision: str | None = setting(None, "--revision REV")
    loading: LoadingSettings = group(LoadingSettings)

    def config(self, *, num_threads: int, gamma: int = 0) -> ModelConfig:
        """Return the model's configuration.

        Args:
            num_threads: threads of a pass, unless the settings have a number.
            gamma: draft tokens that a compiled pass has room for.
        """
        return self.loading.target(self.path, num_threads=num_threads, neuron=self.loading.neuron_options(gamma=gamma))


THEIRS = {
    "backend": "no flag: vLLM is the backend",
    "device": "no flag: vLLM's platform is the device",
    "dtype": "--dtype",
    "sequence_length": "--max-model-len",
    "beyond_positions": "--max-model-len",
    "num_slots": "--max-num-seqs",
    "num_threads": "no flag, but VLLM_CPU_OMP_THREADS_BIND",
    "prefix_caching": "--no-enable-prefix-caching",
    "compile_policy": "--enforce-eager, or none",
    "emulation": "none",
}
"""Settings for loading that only our own engine takes, each with what to tell vLLM in its place."""


@dataclass(frozen=True, slots=True)
class TargetModel(OneModel):
    """Settings of a target's model and engine.

    Attributes:
        engine: specdec: our own; vllm: vLLM, in its own environment, with its flags after -- at the end
            (docs/vllm.md).
        engine_flags: one of vLLM's own flags, or its value; everything after -- is read so.
        noise: noise by which a seed chooses tokens: our own, or that of stock vLLM, for its text at the same seed
            (docs/noise.md) (default: vllm on runner V2 of vLLM, which has no other; else specdec).
        draft: with --engine vllm: a draft model or head in vLLM itself, in the place of draft workers.
    """

    engine: str = setting("specdec", "--engine", choices=("specdec", VLLM))
    engine_flags: tuple[str, ...] = setting((), "--engine_flag FLAG")
    noise: str | None = setting(None, "--noise", choices=tuple(each.value for each in Noise))
    draft: str | None = setting(None, "--draft_model DIR")

    def require_readable(self) -> None:
        """Raise ConfigError if the model's files show that the chosen engine cannot read it; nothing is loaded."""
        if self.engine != VLLM:
            OneModel.require_readable(self)
            return
        files = CheckpointFiles(self.path)
        files.require_model()
        files.require_whole()
        files.require_tokenizer()

    @property
    def own_method(self) -> str | None:
        """Return the name of the method by which vLLM itself is to speculate; None if draft workers are to draft."""
        asked = self.loading.speculation_method
        return "draft_model" if self.draft and asked in (None, "fused") else asked

    def check_engine(self) -> None:
        """Raise ConfigError if a setting is given that the chosen engine does not have."""
        if self.engine != VLLM and self.engine_flags:
            raise ConfigError(f"{self.engine_flags[0]} after --: --engine {VLLM} takes flags of vLLM there")
        if self.engine != VLLM and self.noise == Noise.VLLM:
            raise ConfigError(f"--noise {self.noise} draws as stock vLLM does: it needs --engine {VLLM}")
        if self.engine != VLLM and self.draft is not None:
            ways = (
                f"--engine {VLLM}, specdec fused_target, or draft workers beside this target (specdec worker --attach)"
            )
            raise ConfigError(
                f"--draft_model {self.draft} is not valid for a target on our own engine: there are {ways}"
            )
        lacks_draft = self.own_method not in (None, MTP) and self.draft is None
        if self.engine == VLLM and (lacks_draft or self.own_method in ("vanilla", "medusa")):
            ways = "fused, eagle and eagle3 with --draft_model DIR, or mtp"
            raise ConfigError(f"--speculation_method {self.own_method} is not valid for --engine {VLLM}: take {ways}")
        for each in fields(LoadingSettings):
            if self.engine == VLLM and each.name in THEIRS and getattr(self.loading, each.name) != each.default:
                flag = described(LoadingSettings, each.name, each).key
                raise ConfigError(f"--{flag} is not for --engine {VLLM}: after --, vLLM has {THEIRS[each.name]}")


@dataclass(frozen=True, slots=True)
class DraftModel(Models):
    """Settings of a draft worker's model, or of prompt lookup in place of a model.

    Attributes:
        tokenizer: model directory with the target's tokenizer, where the draft has another (default: the draft's).
        tokenizer_revision: branch, tag or commit of the model with that tokenizer.
    """

    SECTION: ClassVar = "model"
    REVISIONS: ClassVar = {"path": "revision", "tokenizer": "tokenizer_revision"}

    path: str = setting(str(BUNDLED_DRAFT), "--model --draft_model DIR", help=DRAFT_TEXT)
    tokenizer: Path | None = setting(None, "--tokenizer DIR")
    tokenizer_revision: str | None = setting(None, "--tokenizer_revision REV")
    min_vocabulary_share: float = same(ProposerConfig, "min_vocabulary_share")
    revision: str | None = same(OneModel, "revision")
    loading: LoadingSettings = group(LoadingSettings)

    def config(self) -> ProposerConfig:
        """Return the draft's configuration; by default one thread, since a target on this machine takes other cores."""
        neuron = self.loading.neuron_options()
        tokenizer = self.tokenizer or Path(BUNDLED_DRAFT if self.path == NGRAM else self.path)
        config = self.loading.proposer(self.path, tokenizer=tokenizer, num_threads=1, neuron=neuron)
        return replace(config, min_vocabulary_share=self.min_vocabulary_share)


def draft_beside(target: Path, draft: str | None, *, flag: str = "--draft_model", alone: str = "role target") -> str:
    """Return the draft for a target: the one that is named, or the bundled one beside the bundled target.

    Args:
        target: directory of the target.
        draft: draft that the settings name; None if they name none.
        flag, alone: for the error: the flag that names a draft, and the setting that needs none.

    Raises:
        ConfigError: no draft is named and the target is not the bundled one, or `draft` is "none".
    """
    if draft is None and target.resolve() == BUNDLED_TARGET.resolve():
        return str(BUNDLED_DRAFT)
    if draft is None or draft == NO_DRAFT:
        ways = f"{flag} DIR, a smaller model, best with the same tokenizer; {flag} {NGRAM}, no model; {alone}, no draft"
        raise ConfigError(f"target_model {target} has no draft beside it; there are: {ways}")
    return draft


@dataclass(frozen=True, slots=True)
class ModelPair(Models):
    """Settings of target and draft in one process.

    Attributes:
        target: target model directory.
        draft_revision: branch, tag or commit of the draft model.
        draft_tp_degree: logical NeuronCores that the draft is sharded over; must divide --tp_degree (default:
            --tp_degree).
    """

    SECTION: ClassVar = "models"
    REVISIONS: ClassVar = PAIR

    target: Path = setting(BUNDLED_TARGET, "--target_model DIR")
    draft: str | None = setting(
        None, "--draft_model DIR", help=f"{DRAFT_TEXT} (default: the bundled one, beside the bundled target alone)"
    )
    min_vocabulary_share: float = same(ProposerConfig, "min_vocabulary_share")
    revision: str | None = same(OneModel, "revision")
    draft_revision: str | None = setting(None, "--draft_revision REV")
    loading: LoadingSettings = group(LoadingSettings)
    draft_tp_degree: int | None = setting(
        None, "--draft_tp_degree N", section="AWS Neuron devices: the draft beside its target"
    )

    def __post_init__(self) -> None:
        self.proposer()

    def proposer(self) -> str:
        """Return the draft's directory, or "ngram"; for method medusa the target's, which has the draft heads."""
        is_medusa = self.loading.speculation_method == "medusa"
        return str(self.target) if is_medusa else draft_beside(self.target, self.draft)


@dataclass(frozen=True, slots=True)
class CompiledModels(Models):
    """Settings of the models to compile: a target, a draft or both.

    Attributes:
        target: target model directory: compiles what --role target or verify_target loads (with --gamma 0).
        draft: draft model directory: compiles what --role draft loads; with a target, what --role fused_target
            loads.
    """

    SECTION: ClassVar = "models (one, or both)"
    REVISIONS: ClassVar = PAIR

    target: Path | None = setting(None, "--target_model --model DIR")
    draft: Path | None = setting(None, "--draft_model DIR")
    revision: str | None = same(ModelPair, "revision")
    draft_revision: str | None = same(ModelPair, "draft_revision")
    loading: LoadingSettings = group(LoadingSettings, backend="neuron")
    draft_tp_degree: int | None = same(ModelPair, "draft_tp_degree")


@dataclass(frozen=True, slots=True)
class DefaultSettings:
    """Defaults of a target for parameters that a request leaves open.

    Attributes:
        generation_config: auto: read the checkpoint's generation_config.json for values that the flags below leave
            open; none: do not read it.
    """

    SECTION: ClassVar = "defaults for parameters that a request leaves open"

    generation_config: str = setting("auto", "--generation_config", choices=("auto", "none"))
    given: RequestDefaults = group(RequestDefaults)

    def of(self, model: Path) -> RequestDefaults:
        """Return the defaults for the model in a directory: the flags', else those of its generation_config.json.

        Raises:
            ConfigError: a value of the file is outside its range.
        """
        file = model / "generation_config.json"
        if self.generation_config == "none" or not file.is_file():
            return self.given
        stored = CheckpointFiles(model).generation_config
        names = [each.name for each in fields(RequestDefaults)]
        try:
            theirs = RequestDefaults(**{name: stored[name] for name in names if stored.get(name) is not None})
        except (InvalidRequestError, TypeError) as exc:
            raise ConfigError(f"{file}: {exc}; --generation_config none does without it") from exc
        ours = {name: value for name in names if (value := getattr(self.given, name)) is not None}
        return replace(theirs, **ours)


@dataclass(frozen=True, slots=True)
class PairSettings:
    """Settings of roles that run target and draft in one process: both models, and how many tokens are drafted."""

    models: ModelPair = group(ModelPair)
    gamma: int | None = same(FusedConfig, "gamma", default=None)
    adaptive_gamma: bool = same(FusedConfig, "adaptive_gamma")


def fused_config(settings: PairSettings) -> FusedConfig:
    """Return the configuration of target and draft in one process.

    Each of them may use all cores, since only one runs at a time.
    """
    models, loading, gamma = settings.models, settings.models.loading, settings.gamma
    method = loading.method_of_pair(has_draft=models.draft != NGRAM)
    if gamma is None:
        gamma = DEFAULT_GAMMA if loading.backend == "neuron" else FUSED_GAMMA
    neuron = loading.neuron_options(gamma=gamma, method=method)
    target = loading.target(models.target, num_threads=usable_cores(), neuron=neuron)
    draft = loading.proposer(
        models.proposer(),
        tokenizer=models.target,
        num_threads=usable_cores(),
        neuron=loading.neuron_options(method=method, tp_degree=models.draft_tp_degree),
    )
    draft = replace(draft, min_vocabulary_share=models.min_vocabulary_share)
    return FusedConfig(target, draft, gamma, settings.adaptive_gamma)


def fetched(settings: SettingsT) -> SettingsT:
    """Return a role's settings with local directories in place of hub ids; see `Models.fetched`.

    Raises:
        ConfigError: a model cannot be fetched, or its files cannot be read here.
    """
    models = {each.name: getattr(settings, each.name) for each in fields(settings)}
    found = {name: value.fetched() for name, value in models.items() if isinstance(value, Models)}
    for each in found.values():
        each.require_readable()
    return replace(settings, **found)
