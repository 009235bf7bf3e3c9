"""Conversion between protobuf messages and dataclasses, which also decides what an unset field of a message means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sized
from dataclasses import fields, replace
from enum import Enum
from operator import attrgetter
from typing import Any, TypeVar

from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.inference.commit import (
    Commit,
    Counts,
    Delta,
    Finished,
    FinishReason,
    OwnDrafts,
    Started,
    TextEvent,
    Timings,
    TokenAudit,
    TokenLogprobs,
)
from specdec.inference.errors import InvalidRequestError
from specdec.inference.request import (
    LEFT_TO_SERVER,
    MAX_COUNT,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Noise,
    Preamble,
    Provenance,
    RequestDefaults,
    SamplingParams,
    Schedule,
    SeedScope,
    check_logit_bias,
)
from specdec.inference.speculation.tree import MAX_TREE_TOKENS, Branch
from specdec.inference.text.chat import MAX_MESSAGES, Chat, ChatMessage
from specdec.inference.text.grammar_source import written_out
from specdec.inference.text.stop_strings import MAX_STOPS
from specdec.inference.workers import completion
from specdec.inference.workers.completion import DRAFT_SESSION_BYTES

_In = TypeVar("_In")
_Out = TypeVar("_Out")
_Assist = TypeVar("_Assist", pb.AssistRequest, pb.AssistResponse)
PROTOCOL_VERSION = 2

PAD_BYTES = 32
"""The lengths of all messages with draft tokens or committed tokens are multiples of this number of bytes."""
MAX_BRANCHES_OF_MESSAGE = 1024
"""Most branches of a draft tree in one Propose message, far more than a draft needs; each takes memory until it is
added to the tree."""
MAX_TOKENS_OF_MESSAGE = 4096
"""Most draft tokens in one Propose message, counting those of all its branches."""
MAX_TOKENS_OF_PASS = MAX_TREE_TOKENS + 1
"""Most tokens that one pass can commit: the longest path of a draft tree, and one of the target's own."""
MAX_CHARACTERS_OF_PASS = 1024 * MAX_TOKENS_OF_PASS
"""Most characters of the text that one target pass commits. It allows 1024 for each token, more than twice as many as
any known vocabulary's longest token has."""

MAX_NAME_CHARACTERS = 256
"""Most characters of each name in a server's model card; a longer one is cut, since /metrics repeats it 200 times."""


def _numbers(kind: type[Enum], prefix: str) -> dict[Any, Any]:
    """Return a table from each member of an enum to the number that stands for it in protobuf messages.

    The .proto calls the number PREFIX_MEMBER. A member without such a name there gets 0, the number of an unset field.
    """
    return {each: getattr(pb, f"{prefix}_{each.name}", 0) for each in kind}


_REASONS = _numbers(FinishReason, "FINISH_REASON")
_SCHEDULES = {None: pb.SCHEDULE_UNSPECIFIED, **_numbers(Schedule, "SCHEDULE")}
_NOISES = _numbers(Noise, "NOISE")
_SEED_SCOPES = _numbers(SeedScope, "SEED_SCOPE")
_GRAMMARS = _numbers(GrammarKind, "GRAMMAR_KIND")

# Fields that have one name and meaning in a dataclass and its message.
_COMMON = ("max_new_tokens", "min_new_tokens", "cache_salt")
_COMPLETION = (
    *(*_COMMON, "logprobs", "prompt_logprobs", "ignore_eos", "echo", "gamma", "ids_only", "include_rejected"),
    *("adapter", "prediction"),
)
_OPEN = (*_COMMON, "stop_at_eos", "num_committed_tokens")
MAX_ADAPTERS = 1024
"""Most adapters (LoRA) that are taken from a server's model card; further ones are ignored."""
_NAMES = ("name", "topology", "tokenizer_fingerprint", "text_fingerprint", "model_id")  # of a card, and short
_CARD = (*_NAMES, "max_length", "vocab_size", "chat_template", "call_format")
_STARTED = ("num_prompt_tokens", "seed", "prompt_text", "has_grammar", "num_cached_tokens", "adapter")
_AUDIT = ("token_id", "choice", "margin", "rank")
_PROVENANCE = ("model_id", "grammar_version", "prompt_digest")
_SAMPLING_NAMES = [field.name for field in fields(SamplingParams) if field.name not in ("seed", "logit_bias", "noise")]
_MESSAGE_NAMES = [field.name for field in fields(ChatMessage)]
_timings_of = attrgetter(*(field.name for field in fields(Timings)))  # both are fields of pb.Timings, under these names
_counts_of = attrgetter(*(field.name for field in fields(Counts)))


def _to_message(values: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(values, name) for name in names}


def _from_message(message: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a message that `names` lists, by name; an `optional` field that is not set becomes None."""
    known = message.DESCRIPTOR.fields_by_name
    unset = {name for name in names if known[name].has_presence and not message.HasField(name)}
    return {name: None if name in unset else getattr(message, name) for name in names}


def _check_count(values: Sized, limit: int, field: str) -> None:
    """Check the number of elements of a message's field before they are read, since each becomes a Python object.

    Raises:
        InvalidRequestError: there are more than `limit`; the message names field, number and limit.
    """
    if len(values) > limit:
        raise InvalidRequestError(f"{field} has {len(values)} elements, the limit is {limit}", field=field)


async def converted(convert: Callable[[_In], _Out], item: _In, scores: Sized) -> _Out:
    """Return `convert(item)`; it is called in a thread if `scores` is not empty, since it may then take over 0.1 s.

    Args:
        scores: the log-probabilities of a prompt that the item contains; empty if it has none.
    """
    return await asyncio.to_thread(convert, item) if scores else convert(item)


def _known(numbers: dict[Any, Any], number: int, what: str, field: str | None = None) -> Any:
    """Return the enum member that a number in a message stands for.

    Args:
        numbers: table from member to number.
        number: number in the message.
        what: name of the value, for the error's message.
        field: field of the request that the error names.

    Raises:
        InvalidRequestError: no member has the number, which a newer peer may have sent.
    """
    for each, its in numbers.items():
        if its == number:
            return each
    raise InvalidRequestError(f"{what} {number} is not known here", field=field)


def reason_from_message(number: pb.FinishReason) -> FinishReason:
    reason: FinishReason = _known(_REASONS, number, "finish reason")
    return reason


def noise_to_message(noise: Noise) -> pb.Noise:
    number: pb.Noise = _NOISES[noise]
    return number


def noise_from_message(number: pb.Noise) -> Noise:
    """Return the rule for random numbers that a message names; SPECDEC for an unknown number."""
    return next((noise for noise, each in _NOISES.items() if each == number), Noise.SPECDEC)


def sampling_to_message(
    sampling: SamplingParams, seed: int | None, unsaid: frozenset[str] = frozenset()
) -> pb.SamplingParams:
    """Return the message for sampling parameters; fields in `unsaid` stay unset, for the receiver to fill.

    Args:
        seed: seed of the message, instead of that in `sampling`; None leaves it unset.
    """
    biases = [pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias]
    given = [name for name in _SAMPLING_NAMES if name not in unsaid]
    return pb.SamplingParams(seed=seed, logit_bias=biases, **_to_message(sampling, given))


def sampling_from_message(message: pb.SamplingParams) -> SamplingParams:
    """Return the sampling parameters in a message; fields that are not set get the defaults of `SamplingParams`."""
    _check_count(message.logit_bias, MAX_LOGIT_BIASES, "logit_bias")
    values = {field.name: value for field, value in message.ListFields() if field.name != "logit_bias"}
    return SamplingParams(**values, logit_bias=tuple((bias.token_id, bias.bias) for bias in message.logit_bias))


def grammar_to_message(grammar: Grammar | None) -> pb.Grammar | None:
    if grammar is None:
        return None
    after_reasoning = grammar.preamble is not Preamble.NONE
    return pb.Grammar(kind=_GRAMMARS[grammar.kind], text=grammar.text, after_reasoning=after_reasoning)


def _wanted_grammar(message: pb.GenerateRequest | pb.Open) -> Grammar | None:
    if not message.HasField("grammar"):
        return None
    kind = _known(_GRAMMARS, message.grammar.kind, "grammar kind", "grammar")
    preamble = Preamble.REASONING if message.grammar.after_reasoning else Preamble.NONE
    return Grammar(kind, message.grammar.text, preamble)


def logprobs_to_message(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    chosen, *top = (pb.TokenLogprob(token_id=each, logprob=logprob, text=text) for each, logprob, text in logprobs)
    return pb.TokenLogprobs(chosen=chosen, top=top, num_characters=logprobs.num_characters)


def logprobs_from_message(message: pb.TokenLogprobs) -> TokenLogprobs:
    _check_count(message.top, MAX_LOGPROBS, "logprobs.top")
    columns = zip(*((each.token_id, each.logprob, each.text) for each in (message.chosen, *message.top)), strict=True)
    token_ids, logprobs, texts = map(tuple, columns)
    return TokenLogprobs(token_ids, logprobs, texts if any(texts) else (), message.num_characters)


def _timings_to_message(timings: Timings, counts: Counts) -> pb.Timings:
    return pb.Timings(  # written out: a loop over the names takes twice as long
        queue_us=timings.queue_us,
        compute_us=timings.compute_us,
        draft_us=timings.draft_us,
        network_us=timings.network_us,
        bytes_up=counts.bytes_up,
        bytes_down=counts.bytes_down,
        num_wasted_tokens=counts.num_wasted_tokens,
        num_branch_hits=counts.num_branch_hits,
        round_trip_us=timings.round_trip_us,
        step_us=timings.step_us,
        window=counts.window,
        max_branches=counts.max_branches,
    )


def _pass_to_message(piece: Commit) -> dict[str, Any]:
    """Return the values of the fields that both pb.Commit and pb.Delta have, by name, taken from a commit."""
    return {
        "position": piece.position if piece.position >= 0 else None,
        "token_ids": piece.token_ids,
        "num_draft_tokens": piece.num_draft_tokens,
        "num_accepted_tokens": piece.num_accepted_tokens,
        "timings": _timings_to_message(piece.timings, piece.counts),
        "finish_reason": _REASONS[piece.finish_reason] if piece.finish_reason else None,
        "num_lookup_tokens": piece.own.num_lookup_tokens,
        "num_lookup_accepted": piece.own.num_lookup_accepted,
        "num_received_tokens": min(piece.num_received_tokens, MAX_COUNT),
        "hold_us": piece.hold_us,
        "is_held": piece.is_held,
    }


def _pass_from_message(message: pb.Commit | pb.Delta) -> dict[str, Any]:
    """Return the values of the fields that both dataclasses `Commit` and `Delta` have, by name, taken from a message.

    A count above another one that it is a part of, such as accepted above drafted tokens, is lowered to that one.

    Raises:
        InvalidRequestError: the message has too many tokens, or an unknown finish reason.
    """
    token_ids, timings = message.token_ids, message.timings
    _check_count(token_ids, MAX_TOKENS_OF_PASS, "token_ids")
    num_draft_tokens = min(message.num_draft_tokens, MAX_TREE_TOKENS)
    num_accepted_tokens = min(message.num_accepted_tokens, num_draft_tokens, len(token_ids))
    num_lookup_accepted = min(message.num_lookup_accepted, num_accepted_tokens)
    return {
        "token_ids": tuple(token_ids),
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": num_accepted_tokens,
        "timings": Timings(*_timings_of(timings)),
        "counts": Counts(*_counts_of(timings)),
        "finish_reason": reason_from_message(message.finish_reason) if message.finish_reason else None,
        "own": OwnDrafts(min(message.num_lookup_tokens, num_draft_tokens), num_lookup_accepted),
        "num_received_tokens": message.num_received_tokens,
        "hold_us": message.hold_us,
        "is_held": message.is_held,
    }


def completion_to_message(request: completion.CompletionRequest) -> pb.GenerateRequest:
    message = pb.GenerateRequest(
        sampling=sampling_to_message(request.sampling, request.seed, request.unsaid),
        stop_token_ids=sorted(request.stop_token_ids),
        schedule=_SCHEDULES[request.schedule],
        seed_scope=_SEED_SCOPES[request.seed_scope],
        stop=request.stop,
        grammar=grammar_to_message(request.grammar),
        draft_session=bytes.fromhex(request.draft_session),
        **_prompt_to_message(request.prompt),
        audit=request.audit is not None,
        **_to_message(request, _COMPLETION),
    )
    if request.audit is not None:
        message.committed_token_ids.CopyFrom(pb.TokenIds(ids=request.audit))
    elif request.resume is not None:
        origin = request.resume.provenance
        message.committed_token_ids.CopyFrom(pb.TokenIds(ids=request.resume.token_ids))  # none, too, must be there
        message.model_id, message.prompt_digest = origin.model_id, origin.prompt_digest
        if message.HasField("grammar"):
            message.grammar.version = origin.grammar_version
    return message


def _draft_session(message: pb.GenerateRequest) -> str:
    name = message.draft_session
    if name and len(name) != DRAFT_SESSION_BYTES:
        fault = f"draft_session has {len(name)} bytes, {DRAFT_SESSION_BYTES} are expected"
        raise InvalidRequestError(fault, field="draft_session")
    return name.hex()


def _wanted_resume(message: pb.GenerateRequest) -> completion.Resume | None:
    if message.audit or not message.HasField("committed_token_ids"):
        return None
    provenance = Provenance(message.model_id, message.grammar.version, message.prompt_digest)
    return completion.Resume(tuple(message.committed_token_ids.ids), provenance)


def _prompt_to_message(prompt: str | tuple[int, ...] | Chat) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if not isinstance(prompt, Chat):
        return {"token_ids": pb.TokenIds(ids=prompt)}
    messages = [pb.ChatMessage(**_to_message(each, _MESSAGE_NAMES)) for each in prompt.messages]
    chat = pb.Chat(messages=messages, tools_json=prompt.tools_json, template_kwargs_json=prompt.template_kwargs_json)
    return {"chat": chat}


def tokenize_to_message(prompt: str | Chat, *, special: bool) -> pb.TokenizeRequest:
    return pb.TokenizeRequest(without_special_tokens=not special, **_prompt_to_message(prompt))


def tokenize_from_message(message: pb.TokenizeRequest) -> str | Chat:
    if message.WhichOneof("prompt") is None:
        raise InvalidRequestError("the request has no prompt: set text or chat")
    return _chat_from_message(message.chat) if message.HasField("chat") else message.text


def _prompt_from_message(message: pb.GenerateRequest) -> str | tuple[int, ...] | Chat:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError("the request has no prompt: set text, token_ids or chat", field="prompt")
    if kind == "text":
        return message.text
    if kind == "token_ids":
        return tuple(message.token_ids.ids)
    return _chat_from_message(message.chat)


def _chat_from_message(message: pb.Chat) -> Chat:
    if not message.messages:
        raise InvalidRequestError("messages: the chat has none", field="messages")
    _check_count(message.messages, MAX_MESSAGES, "messages")
    messages = (ChatMessage(**_from_message(each, _MESSAGE_NAMES)) for each in message.messages)
    return Chat(tuple(messages), message.tools_json, message.template_kwargs_json)


def completion_from_message(message: pb.GenerateRequest) -> completion.CompletionRequest:
    _check_count(message.stop, MAX_STOPS, "stop")
    _check_count(message.stop_token_ids, MAX_STOP_TOKEN_IDS, "stop_token_ids")
    return completion.CompletionRequest(
        prompt=_prompt_from_message(message),
        sampling=sampling_from_message(message.sampling),
        seed=message.sampling.seed if message.sampling.HasField("seed") else None,
        unsaid=frozenset(name for name in LEFT_TO_SERVER if not message.sampling.HasField(name)),
        stop_token_ids=frozenset(message.stop_token_ids),
        schedule=_known(_SCHEDULES, message.schedule, "schedule", "schedule"),
        seed_scope=_known(_SEED_SCOPES, message.seed_scope, "seed_scope", "seed_scope"),
        stop=tuple(message.stop),
        grammar=_wanted_grammar(message),
        resume=_wanted_resume(message),
        audit=tuple(message.committed_token_ids.ids) if message.audit else None,
        draft_session=_draft_session(message),
        **_from_message(message, _COMPLETION),
    )


def event_to_message(event: TextEvent) -> pb.GenerateResponse:
    if isinstance(event, Started):
        started = pb.Started(
            prompt_logprobs=map(logprobs_to_message, event.prompt_logprobs),
            defaults=None if event.defaults is None else _defaults_to_message(event.defaults),
            audits=(pb.TokenAudit(**_to_message(each, _AUDIT)) for each in event.audits),
            **_to_message(event, _STARTED),
            **_to_message(event.provenance, _PROVENANCE),
        )
        return pb.GenerateResponse(started=started)
    if isinstance(event, Finished):
        return pb.GenerateResponse(finished=pb.GenerationFinished(reason=_REASONS[event.reason]))
    texts = _to_message(event, ("text", "piece_lengths", "rejected_text", "rejected_token_ids"))
    logprobs = map(logprobs_to_message, event.logprobs) if event.logprobs else None
    delta = pb.Delta(logprobs=logprobs, is_predicted=event.own.is_predicted, **texts, **_pass_to_message(event))
    return pb.GenerateResponse(delta=delta)


def event_from_message(message: pb.GenerateResponse) -> TextEvent:
    kind = message.WhichOneof("event")
    if kind == "started":
        begun = message.started
        _check_count(begun.prompt_logprobs, begun.num_prompt_tokens, "prompt_logprobs")
        return Started(
            prompt_logprobs=all_logprobs(begun.prompt_logprobs),
            defaults=_defaults_from_message(begun.defaults) if begun.HasField("defaults") else None,
            provenance=Provenance(**_from_message(begun, _PROVENANCE)),
            audits=tuple(TokenAudit(**_from_message(each, _AUDIT)) for each in begun.audits),
            **_from_message(begun, _STARTED),
        )
    if kind == "finished":
        return Finished(reason_from_message(message.finished.reason))
    delta = message.delta
    _check_count(delta.piece_lengths, MAX_TOKENS_OF_PASS, "piece_lengths")
    _check_count(delta.text, MAX_CHARACTERS_OF_PASS, "text")
    _check_count(delta.logprobs, MAX_TOKENS_OF_PASS, "logprobs")
    _check_count(delta.rejected_text, MAX_CHARACTERS_OF_PASS, "rejected_text")
    _check_count(delta.rejected_token_ids, MAX_TOKENS_OF_PASS, "rejected_token_ids")
    common = _pass_from_message(delta)
    return Delta(
        own=replace(common.pop("own"), is_predicted=delta.is_predicted),
        text=delta.text,
        rejected_text=delta.rejected_text,
        rejected_token_ids=tuple(delta.rejected_token_ids),
        piece_lengths=tuple(delta.piece_lengths),
        position=delta.position if delta.HasField("position") else -1,
        logprobs=all_logprobs(delta.logprobs),
        **common,
    )


def open_to_message(request: GenerationRequest, *, fingerprint: str, vocab_size: int) -> pb.Open:
    return pb.Open(
        protocol_version=PROTOCOL_VERSION,
        tokenizer_fingerprint=fingerprint,
        vocab_size=vocab_size,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_message(request.sampling, request.sampling.seed),
        stop_token_ids=sorted(request.stop_token_ids),
        schedule=_SCHEDULES[request.schedule],
        gamma=request.gamma,
        grammar=grammar_to_message(request.grammar and written_out(request.grammar)),
        **_to_message(request, _OPEN),
    )


def open_from_message(message: pb.Open) -> GenerationRequest:
    if not message.sampling.HasField("seed"):
        raise InvalidRequestError("sampling.seed is unset: draft and target need the same one", field="seed")
    _check_count(message.stop_token_ids, MAX_STOP_TOKEN_IDS, "stop_token_ids")
    sampling = sampling_from_message(message.sampling)
    if message.vocab_size:  # unset if Attach has named it
        check_logit_bias(sampling, vocab_size=message.vocab_size)
    return GenerationRequest(
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling,
        stop_token_ids=frozenset(message.stop_token_ids),
        gamma=message.gamma or None,
        schedule=_known(_SCHEDULES, message.schedule, "schedule", "schedule"),
        grammar=_wanted_grammar(message),
        **_from_message(message, _OPEN),
    )


def branches_from_message(message: pb.Propose) -> list[Branch]:
    if len(message.branches) > MAX_BRANCHES_OF_MESSAGE:
        raise InvalidRequestError(f"{len(message.branches)} branches of one message exceed {MAX_BRANCHES_OF_MESSAGE}")
    num_tokens = sum(len(branch.token_ids) for branch in message.branches)
    if num_tokens > MAX_TOKENS_OF_MESSAGE:
        raise InvalidRequestError(f"{num_tokens} draft tokens of one message exceed {MAX_TOKENS_OF_MESSAGE}")
    return [_branch_from_message(branch, message.step_us) for branch in message.branches]


def _branch_from_message(message: pb.Branch, step_us: int) -> Branch:
    kind = message.WhichOneof("parent")
    if kind is None:
        raise InvalidRequestError("a branch has no parent: set prefix_length or parent_node")
    if not message.token_ids:
        raise InvalidRequestError("a branch has no token; to ask for the target's own token, propose no branch")
    if len(message.token_ids) > MAX_TREE_TOKENS:
        num_tokens = len(message.token_ids)
        raise InvalidRequestError(f"a branch of {num_tokens} tokens exceeds the limit of {MAX_TREE_TOKENS}")
    parent_node = message.parent_node if kind == "parent_node" else None
    return Branch(parent_node, message.prefix_length, tuple(message.token_ids), step_us)


def branch_to_message(branch: Branch) -> pb.Branch:
    if branch.parent_node is None:
        return pb.Branch(prefix_length=branch.prefix_length, token_ids=branch.token_ids)
    return pb.Branch(parent_node=branch.parent_node, token_ids=branch.token_ids)


def commit_to_message(commit: Commit) -> pb.Commit:
    """Return the message that tells a draft worker which tokens are committed; it has no log-probabilities."""
    return pb.Commit(**_pass_to_message(commit))


def padded(message: _Assist) -> _Assist:
    """Lengthen a message to a multiple of PAD_BYTES bytes by its field `padding`; return the message.

    Otherwise the length could reveal to an eavesdropper which tokens the message has (arXiv 2411.01076).
    """
    missing = -(message.ByteSize() + 2) % PAD_BYTES  # the field itself takes two bytes
    message.padding = bytes(missing or PAD_BYTES)
    return message


def all_logprobs(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of several positions, one entry for each message."""
    return tuple(map(logprobs_from_message, messages))


def commit_from_message(message: pb.Commit) -> Commit:
    return Commit(position=message.position, **_pass_from_message(message))


def card_to_message(card: completion.ModelCard) -> pb.GetModelResponse:
    defaults = _defaults_to_message(card.defaults)
    return pb.GetModelResponse(defaults=defaults, adapters=card.adapters, **_to_message(card, _CARD))


def _defaults_to_message(defaults: RequestDefaults) -> pb.RequestDefaults:
    return pb.RequestDefaults(max_new_tokens=defaults.max_new_tokens, **defaults.sampling)


def _defaults_from_message(message: pb.RequestDefaults) -> RequestDefaults:
    return RequestDefaults(**{field.name: value for field, value in message.ListFields()})


def card_from_message(message: pb.GetModelResponse) -> completion.ModelCard:
    values = _from_message(message, _CARD)
    values |= {name: values[name][:MAX_NAME_CHARACTERS] for name in _NAMES}
    adapters = tuple(name for name in message.adapters[:MAX_ADAPTERS] if len(name) <= MAX_NAME_CHARACTERS)
    return completion.ModelCard(defaults=_defaults_from_message(message.defaults), adapters=adapters, **values)
