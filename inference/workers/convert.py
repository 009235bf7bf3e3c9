"""Messages to dataclasses and back; nowhere else. Unset fields get their meaning here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from grpc_comm.specdec.v1 import specdec_pb2 as pb
from inference import types
from inference.errors import InvalidRequestError
from inference.workers import completion

PROTOCOL_VERSION = 1

Branch: TypeAlias = tuple[str, int, Sequence[int]]
"""("prefix" | "node", prefix length | node number, token ids)"""

_REASON_TO_MESSAGE = {
    types.FinishReason.STOP: pb.FINISH_REASON_STOP,
    types.FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_SCHEDULE_TO_MESSAGE = {
    None: pb.SCHEDULE_UNSPECIFIED,
    types.Schedule.SYNC: pb.SCHEDULE_SYNC,
    types.Schedule.ASYNC: pb.SCHEDULE_ASYNC,
}
_SCHEDULE_FROM_MESSAGE = {number: schedule for schedule, number in _SCHEDULE_TO_MESSAGE.items()}
_REASON_FROM_MESSAGE = {number: reason for reason, number in _REASON_TO_MESSAGE.items()}


def reason_to_message(reason: types.FinishReason) -> pb.FinishReason:
    return _REASON_TO_MESSAGE[reason]


def reason_from_message(number: pb.FinishReason) -> types.FinishReason:
    try:
        return _REASON_FROM_MESSAGE[number]
    except KeyError:
        raise InvalidRequestError(f"finish reason {number} is not known here") from None


def schedule_from_message(number: pb.Schedule) -> types.Schedule | None:
    if number not in _SCHEDULE_FROM_MESSAGE:
        raise InvalidRequestError(f"schedule {number} is not known here")
    return _SCHEDULE_FROM_MESSAGE[number]


def sampling_to_message(sampling: types.SamplingParams, seed: int | None) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=seed,
    )


def sampling_from_message(message: pb.SamplingParams) -> types.SamplingParams:
    return types.SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        seed=message.seed,
    )


def timings_to_message(timings: types.Timings) -> pb.Timings:
    return pb.Timings(
        queue_us=timings.queue_us,
        compute_us=timings.compute_us,
        draft_us=timings.draft_us,
        network_us=timings.network_us,
        bytes_up=timings.bytes_up,
        bytes_down=timings.bytes_down,
    )


def timings_from_message(message: pb.Timings) -> types.Timings:
    return types.Timings(
        queue_us=message.queue_us,
        compute_us=message.compute_us,
        draft_us=message.draft_us,
        network_us=message.network_us,
        bytes_up=message.bytes_up,
        bytes_down=message.bytes_down,
    )


def completion_to_message(request: completion.CompletionRequest) -> pb.GenerateRequest:
    message = pb.GenerateRequest(
        sampling=sampling_to_message(request.sampling, request.seed),
        max_new_tokens=request.max_new_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        gamma=request.gamma,
        schedule=_SCHEDULE_TO_MESSAGE[request.schedule],
    )
    if isinstance(request.prompt, str):
        message.text = request.prompt
    else:
        message.token_ids.ids.extend(request.prompt)
    return message


def completion_from_message(message: pb.GenerateRequest) -> completion.CompletionRequest:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError("the request has no prompt: set text or token_ids")
    has_limit = message.HasField("max_new_tokens")
    return completion.CompletionRequest(
        prompt=message.text if kind == "text" else tuple(message.token_ids.ids),
        sampling=sampling_from_message(message.sampling),
        seed=message.sampling.seed if message.sampling.HasField("seed") else None,
        max_new_tokens=message.max_new_tokens if has_limit else completion.DEFAULT_MAX_NEW_TOKENS,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        gamma=message.gamma if message.HasField("gamma") else None,
        schedule=schedule_from_message(message.schedule),
    )


def event_to_message(event: completion.Event) -> pb.GenerateResponse:
    if isinstance(event, completion.Started):
        return pb.GenerateResponse(started=pb.Started(num_prompt_tokens=event.num_prompt_tokens, seed=event.seed))
    if isinstance(event, completion.Finished):
        return pb.GenerateResponse(finished=pb.GenerationFinished(reason=reason_to_message(event.reason)))
    delta = pb.Delta(
        token_ids=event.token_ids,
        text=event.text,
        num_draft_tokens=event.num_draft_tokens,
        num_accepted_tokens=event.num_accepted_tokens,
        timings=timings_to_message(event.timings),
    )
    return pb.GenerateResponse(delta=delta)


def event_from_message(message: pb.GenerateResponse) -> completion.Event:
    kind = message.WhichOneof("event")
    if kind == "started":
        return completion.Started(message.started.num_prompt_tokens, message.started.seed)
    if kind == "finished":
        return completion.Finished(reason_from_message(message.finished.reason))
    delta = message.delta
    return completion.Delta(
        tuple(delta.token_ids),
        delta.text,
        delta.num_draft_tokens,
        delta.num_accepted_tokens,
        timings_from_message(delta.timings),
    )


def open_to_message(request: types.GenerationRequest, *, fingerprint: str, vocab_size: int) -> pb.Open:
    return pb.Open(
        protocol_version=PROTOCOL_VERSION,
        tokenizer_fingerprint=fingerprint,
        vocab_size=vocab_size,
        prompt_token_ids=request.prompt_token_ids,
        num_committed_tokens=request.num_committed_tokens,
        sampling=sampling_to_message(request.sampling, request.sampling.seed),
        max_new_tokens=request.max_new_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        schedule=_SCHEDULE_TO_MESSAGE[request.schedule],
        gamma=request.gamma,
    )


def open_from_message(message: pb.Open) -> types.GenerationRequest:
    if not message.sampling.HasField("seed"):
        raise InvalidRequestError("sampling.seed is unset: draft and target need the same one")
    return types.GenerationRequest(
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_message(message.sampling),
        max_new_tokens=message.max_new_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        gamma=message.gamma or None,
        schedule=schedule_from_message(message.schedule),
        num_committed_tokens=message.num_committed_tokens,
    )


def branches_from_message(message: pb.Propose) -> list[Branch]:
    return [_branch_from_message(branch) for branch in message.branches]


def _branch_from_message(message: pb.Branch) -> Branch:
    kind = message.WhichOneof("parent")
    if kind is None:
        raise InvalidRequestError("a branch has no parent: set prefix_length or parent_node")
    if not message.token_ids:
        raise InvalidRequestError("a branch has no token; to ask for the target's own token, propose no branch")
    if kind == "parent_node":
        return "node", message.parent_node, tuple(message.token_ids)
    return "prefix", message.prefix_length, tuple(message.token_ids)


def commit_to_message(commit: types.Commit) -> pb.Commit:
    return pb.Commit(
        position=commit.position,
        token_ids=commit.token_ids,
        num_accepted_tokens=commit.num_accepted_tokens,
        num_draft_tokens=commit.num_draft_tokens,
        timings=timings_to_message(commit.timings),
        finish_reason=_REASON_TO_MESSAGE[commit.finish_reason] if commit.finish_reason else None,
    )


def commit_from_message(message: pb.Commit) -> types.Commit:
    return types.Commit(
        position=message.position,
        token_ids=tuple(message.token_ids),
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        timings=timings_from_message(message.timings),
        finish_reason=reason_from_message(message.finish_reason) if message.finish_reason else None,
    )
