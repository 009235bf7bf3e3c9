"""Request of a client with its prompt as token ids, its sampling parameters, and the ranges of all of them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from specdec.inference.errors import IncompatibleDraftError, InvalidRequestError
from specdec.inference.settings import SETTING, Range, described, field_of, same, setting

MAX_SEED = 2**64 - 1
MAX_COUNT = 2**32 - 1
"""Largest count in a request; a message has 32 bits for each."""
MAX_GAMMA = 64
GAMMA = Range(0, MAX_GAMMA)
DEFAULT_MAX_NEW_TOKENS = 128
"""Most output tokens if neither the request nor the server sets a limit."""
MAX_LOGPROBS = 20
"""Most tokens, beside the chosen one, whose log-probabilities a request can ask for at each position."""
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
"""Most tokens to which one request can give a bias."""
MAX_GRAMMAR_CHARACTERS = 256 * 1024
"""Most characters of a grammar; the JSON schemas of Kubernetes have up to 200,000."""
MAX_CACHE_SALT_CHARACTERS = 256
MAX_PREDICTION_CHARACTERS = 256 * 1024
"""Most characters of a prediction; while its request is open, each of its tokens takes some 60 bytes."""


BIAS = Range(-100.0, 100.0)
"""Range of the bias that is added to a token's logit."""
MAX_NEW_TOKENS = Range(1, MAX_COUNT)


def _require(condition: bool, message: str, field: str | None = None) -> None:
    if not condition:
        raise InvalidRequestError(message, field=field)


class Noise(enum.StrEnum):
    """Rule by which a seed gives the random numbers for the choice of tokens (docs/noise.md); a target has one rule."""

    SPECDEC = "specdec"
    VLLM = "vllm"  # stock vLLM's, since 0.31


class SeedScope(enum.StrEnum):
    """Scope of a seed: which of the requests with this seed get the same random numbers."""

    ALL = "all"
    PROMPT = "prompt"  # those of the same prompt: its token ids are mixed into the seed (docs/noise.md)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of the choice of one token from one row of logits.

    Bias and penalties change every choice; top_k, top_p, min_p and seed only those at a temperature above 0.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the K likeliest tokens, 0 for all.
        top_p: keep the likeliest tokens that together have this probability.
        min_p: keep tokens that have this share of the best one's probability.
        seed: 64-bit key of the noise.
        repetition_penalty: for tokens in prompt or output, divide positive logits by this, and multiply negative ones;
            1 for none.
        presence_penalty: subtract this from the logits of tokens in the output.
        frequency_penalty: subtract this from the logits of tokens in the output, as often as they occur there.
        logit_bias: (token id, bias) pairs, added to the logits; every token once.
        noise: rule by which a seed gives the random numbers of the choice (docs/noise.md). The target sets it.

    Raises:
        InvalidRequestError: a value is outside its range.
    """

    temperature: float = setting(0.0, "--temperature T", within=Range(0.0, 100.0))
    top_k: int = setting(0, "--top_k K", within=Range(0, MAX_COUNT))
    top_p: float = setting(1.0, "--top_p P", within=Range(0.0, 1.0, above=True))
    min_p: float = setting(0.0, "--min_p P", within=Range(0.0, 1.0))
    seed: int = setting(0, within=Range(0, MAX_SEED))
    repetition_penalty: float = setting(1.0, "--repetition_penalty R", within=Range(0.0, 100.0, above=True))
    presence_penalty: float = setting(0.0, "--presence_penalty P", within=Range(-2.0, 2.0))
    frequency_penalty: float = setting(0.0, "--frequency_penalty P", within=Range(-2.0, 2.0))
    logit_bias: tuple[tuple[int, float], ...] = ()
    noise: Noise = Noise.SPECDEC

    def __post_init__(self) -> None:
        for name, limits in RANGES.items():
            value = getattr(self, name)
            if value not in limits:  # not by `_require`: eight messages cost a request more than its checks
                raise InvalidRequestError(f"{name} {value} is outside {limits}", field=name)
        if self.logit_bias:
            self._check_logit_bias()

    def _check_logit_bias(self) -> None:
        num_biases = len(self.logit_bias)
        limit = f"logit_bias has {num_biases} tokens, the limit is {MAX_LOGIT_BIASES}"
        _require(num_biases <= MAX_LOGIT_BIASES, limit, "logit_bias")
        _require(len(dict(self.logit_bias)) == num_biases, "logit_bias names a token twice", "logit_bias")
        for token_id, bias in self.logit_bias:
            if token_id < 0:
                raise InvalidRequestError(f"logit_bias names token {token_id}, which is below 0", field="logit_bias")
            if bias not in BIAS:
                fault = f"logit_bias {bias} of token {token_id} is outside {BIAS}"
                raise InvalidRequestError(fault, field="logit_bias")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def truncates(self) -> bool:
        """Return whether sampling removes tokens by top_k, top_p or min_p."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalizes(self) -> bool:
        """Return whether there are penalties, which make the choice depend on which tokens came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


RANGES = {each.name: each.metadata[SETTING].within for each in fields(SamplingParams) if SETTING in each.metadata}
"""Ranges of the numeric fields of `SamplingParams`; the HTTP schema reads them here."""


@dataclass(frozen=True, slots=True)
class MinLengthSampling(SamplingParams):
    """Sampling parameters of a request with `min_new_tokens`, made by `GenerationRequest.effective_sampling`.

    Attributes:
        held_back: token ids that may not be chosen at positions below `until`, since they would end the output.
        until: first position at which they may be chosen.
    """

    held_back: tuple[int, ...] = ()
    until: int = 0


def _left_open(name: str, note: str = "") -> Any:
    """Return a declaration of a field like that of `SamplingParams`, but with None as default.

    Its help ends with the default of `SamplingParams`, and with `note`.
    """
    parameter = field_of(SamplingParams, name)
    text = f"{described(SamplingParams, name, parameter).help} ({parameter.default:g}{note})"
    return same(SamplingParams, name, default=None, help=text)


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """Defaults of a server for parameters that a request leaves open; None: the server sets no default.

    Draft workers and gateways take them from their target, so that tokens do not depend on which server is asked.

    Raises:
        InvalidRequestError: a value is outside its range.
    """

    temperature: float | None = _left_open("temperature", "; over HTTP 1, as OpenAI's")
    top_k: int | None = _left_open("top_k")
    top_p: float | None = _left_open("top_p")
    min_p: float | None = _left_open("min_p")
    repetition_penalty: float | None = _left_open("repetition_penalty")
    max_new_tokens: int | None = setting(
        None,
        "--max_new_tokens N",
        help=f"output tokens ({DEFAULT_MAX_NEW_TOKENS}; over HTTP as OpenAI has it)",
        within=MAX_NEW_TOKENS,
    )

    def __post_init__(self) -> None:
        SamplingParams(**self.sampling)
        if self.max_new_tokens is not None:
            _check_max_new_tokens(self.max_new_tokens)

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the values of those fields of `SamplingParams` for which the server sets a default, by name."""
        return {name: value for name in LEFT_TO_SERVER if (value := getattr(self, name)) is not None}


LEFT_TO_SERVER = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of `SamplingParams` that a request may leave to the server."""
NO_DEFAULTS = RequestDefaults()


class GrammarKind(enum.Enum):
    """Language in which a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # a JSON array of texts
    GRAMMAR = "grammar"  # Lark, or GBNF (an EBNF)


class Preamble(enum.Enum):
    """Text before the part of an output to which its grammar applies."""

    NONE = "none"
    REASONING = "reasoning"  # reasoning may come first, from its opening mark to its closing mark
    REST_OF_REASONING = "rest"  # the rest of a reasoning that the prompt has begun


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar that an output must keep to; docs/structured.md has the rules of each kind.

    Raises:
        InvalidRequestError: the text is empty or too long.
    """

    kind: GrammarKind
    text: str
    preamble: Preamble = Preamble.NONE

    def __post_init__(self) -> None:
        length, limit = len(self.text), MAX_GRAMMAR_CHARACTERS
        _require(1 <= length <= limit, f"the grammar has {length} characters; 1..{limit} may be", "grammar")


ANY_JSON_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')


class Schedule(enum.Enum):
    """How a draft worker and its target take turns: in rounds, or with a draft that runs ahead."""

    SYNC = "sync"  # rounds: draft, send, wait for the verdict
    ASYNC = "async"  # run-ahead: the draft goes on, the target verifies what has arrived or decodes by itself
    LOAD = "load"  # chosen for each request when its drafting begins

    @property
    def target_waits(self) -> bool:
        """Return whether each pass of the target waits for a proposal."""
        return self is Schedule.SYNC

    @property
    def runs_ahead(self) -> bool:
        """Return whether the draft goes on, at least under low load, before the target has verified its tokens."""
        return self is not Schedule.SYNC


@dataclass(frozen=True, slots=True)
class Provenance:
    """Origin of an output. A server that is to continue the output must agree in each field, or its text would differ.

    Attributes:
        model_id: hash of all that the model's tokens depend on; empty where it is unknown, or where a device draws
            random numbers of its own, so that no other server can resume.
        grammar_version: version of what compiles a grammar into masks of the allowed tokens; empty without a grammar.
        prompt_digest: digest of the prompt's token ids, 16 hexadecimal digits; empty if it is not known.
    """

    model_id: str = ""
    grammar_version: str = ""
    prompt_digest: str = ""

    def require_same(self, here: Provenance) -> None:
        """Check that a server whose own provenance is `here` can continue an output with this provenance.

        Raises:
            IncompatibleDraftError: a value differs, or the server does not know its model; the message has both values.
        """
        for each in fields(self):
            there, own = getattr(self, each.name), getattr(here, each.name)
            if there != own or (each.name == "model_id" and not own):
                message = f"the output began with {each.name} {there or 'unknown'}, here it is {own or 'unknown'}"
                way = "take a server where it is the same, or ask anew"
                raise IncompatibleDraftError(f"{message}: it cannot resume, {way}")


UNKNOWN = Provenance()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Parameters that requests with a text (`CompletionRequest`) and with token ids (`GenerationRequest`) share.

    Attributes:
        stop_token_ids: ids that end the sequence once one of them is committed.
        gamma: speculation length asked for by the client; None leaves it to the server, 0 switches speculation off.
        schedule: drafting schedule asked for by the client, see `Schedule`; None leaves it to the server.
        logprobs: number of best tokens with log-probabilities beside each token's own; None asks for none.
        min_new_tokens: output tokens before which nothing ends the sequence.
        prompt_logprobs: like `logprobs`, for the prompt's tokens; the first event has them.
        grammar: grammar of the output; it ends with an end-of-sequence token, so those must end the sequence.
        cache_salt: prompts share cached prefixes only if their salts are equal.
        draft_session: name, in hexadecimal digits, under which the client's own draft worker proposes tokens on the
            same connection; a server puts the client's name and address before it. Empty without such a worker.
        include_rejected: commits carry the draft tokens that their passes rejected.
        adapter: name of an adapter (LoRA) that the target computes with; empty for the model itself.
    """

    stop_token_ids: frozenset[int] = frozenset()
    gamma: int | None = None
    schedule: Schedule | None = None
    logprobs: int | None = None
    min_new_tokens: int = 0
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    cache_salt: str = ""
    draft_session: str = ""
    include_rejected: bool = False
    adapter: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """Return the values of these parameters by name, to make a request of another subclass with them."""
        return {each.name: getattr(self, each.name) for each in fields(Options)}


@dataclass(frozen=True, slots=True)
class GenerationRequest(Options):
    """Request with its prompt as token ids, the form that engines take.

    Attributes:
        prompt_token_ids: at least one token id.
        max_new_tokens: upper limit of output tokens, >= 1; generation also ends where the context is full.
        stop_at_eos: the sequence also ends after any end-of-sequence token of the target; with a grammar it must.
        num_committed_tokens: number of the prompt's last tokens that are output of an earlier stream (resume).
        audits: compare each of the `num_committed_tokens` tokens with the target's choice; the first event has the
            result.
        prediction: token ids that the output may repeat, all or in parts; they change only the speed.

    Raises:
        InvalidRequestError: a value is outside its range.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    stop_at_eos: bool = False
    num_committed_tokens: int = 0
    audits: bool = False
    prediction: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        num_prompt_tokens, num_committed = len(self.prompt_token_ids), self.num_committed_tokens
        _require(num_prompt_tokens >= 1, "the prompt has no token", "prompt")
        gamma, logprobs = self.gamma, self.logprobs
        _check_max_new_tokens(self.max_new_tokens)
        _require(gamma is None or gamma in GAMMA, f"gamma {gamma} is outside {GAMMA}", "gamma")
        num_stops = len(self.stop_token_ids)
        too_many = f"{num_stops} stop_token_ids exceed {MAX_STOP_TOKEN_IDS}"
        _require(num_stops <= MAX_STOP_TOKEN_IDS, too_many, "stop_token_ids")
        _require(
            0 <= num_committed < num_prompt_tokens,
            f"num_committed_tokens {num_committed} is not below the prompt's {num_prompt_tokens} tokens",
            "num_committed_tokens",
        )
        _check_num_logprobs("logprobs", logprobs)
        _check_num_logprobs("prompt_logprobs", self.prompt_logprobs)
        endless = "ignore_eos: an output with a grammar ends where the grammar does, with an end-of-sequence token"
        _require(self.grammar is None or self.stop_at_eos, endless, "ignore_eos")
        held = "min_new_tokens: an output with a grammar ends where the grammar does"
        _require(self.grammar is None or not self.min_new_tokens, held, "min_new_tokens")
        salted, most = len(self.cache_salt), MAX_CACHE_SALT_CHARACTERS
        _require(salted <= most, f"cache_salt has {salted} characters, the limit is {most}", "cache_salt")

    def resumed(self, token_ids: Sequence[int]) -> GenerationRequest:
        """Return the request for the rest of the output, behind the tokens `token_ids` that are committed already.

        Every resume, after a lost connection or a failed pass, uses this method. A token is a function of target,
        prompt, parameters, seed and position; so any server of the model can continue after the committed tokens.
        """
        return replace(
            self,
            prompt_token_ids=(*self.prompt_token_ids, *token_ids),
            max_new_tokens=max(1, self.max_new_tokens - len(token_ids)),
            num_committed_tokens=self.num_committed_tokens + len(token_ids),
            prompt_logprobs=None if token_ids else self.prompt_logprobs,  # the interrupted stream has sent them already
        )

    def effective_sampling(self, eos_token_ids: frozenset[int] = frozenset()) -> SamplingParams:
        """Return the sampling parameters with which tokens are chosen, including what `min_new_tokens` asks for.

        Tokens that would end the output are held back until it has so many tokens.

        Args:
            eos_token_ids: end-of-sequence ids of the model, for requests that stop at them. Draft and target may know
                different ones: the target's decide, the draft's only improve its proposals.
        """
        if not self.min_new_tokens:
            return self.sampling
        ends = self.stop_token_ids | (eos_token_ids if self.stop_at_eos else frozenset())
        asked = {each.name: getattr(self.sampling, each.name) for each in fields(SamplingParams)}
        until = self.output_start + self.min_new_tokens
        return MinLengthSampling(**asked, held_back=tuple(sorted(ends)), until=until)

    @property
    def output_start(self) -> int:
        """Return the position of the first output token, which is the same after a resume."""
        return len(self.prompt_token_ids) - self.num_committed_tokens


def _check_max_new_tokens(limit: int) -> None:
    _require(limit in MAX_NEW_TOKENS, f"max_new_tokens {limit} is outside {MAX_NEW_TOKENS}", "max_new_tokens")


def _check_num_logprobs(name: str, count: int | None) -> None:
    _require(count is None or 0 <= count <= MAX_LOGPROBS, f"{name} {count} is outside 0..{MAX_LOGPROBS}", name)


def check_logit_bias(sampling: SamplingParams, *, vocab_size: int) -> None:
    """Raise InvalidRequestError if `logit_bias` names a token that is not below `vocab_size`."""
    for token_id, _ in sampling.logit_bias:
        if token_id >= vocab_size:
            fault = f"logit_bias names token {token_id}, outside the vocabulary of {vocab_size}"
            raise InvalidRequestError(fault, field="logit_bias")
