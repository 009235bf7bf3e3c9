"""Scheduler in vLLM's engine core: vLLM's own, given the draft tokens that have arrived before each pass.

It overrides only methods of vLLM's `SchedulerInterface`, and reads tokens, limits and `extra_args` of requests.
"""

from __future__ import annotations

import itertools
import secrets
import time
from pathlib import Path
from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import DraftTokenIds

from specdec.inference.errors import ConfigError
from specdec.inference.request import Noise
from specdec.inference.speculation.answers import Origin
from specdec.inference.text.tokenizer import MAX_PACKED_BYTES, Tokenizer
from specdec.inference.vllm.adoption import adopted
from specdec.inference.vllm.drafts import Drafts
from specdec.inference.vllm.frames import Gone, Passed, Row, Served
from specdec.inference.vllm.grammars import feed_grammar, take_own_grammars
from specdec.inference.vllm.link import Link, Place
from specdec.inference.vllm.options import noise_of, require_kept
from specdec.inference.vllm.runner_v2 import count_output_from
from specdec.inference.vllm.translation import KEY, METHOD

HOOKS = {
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "add_request schedule update_draft_token_ids update_from_output finish_requests shutdown "
        "requests running waiting num_spec_tokens max_model_len vllm_config"
    ),
    "vllm.v1.request:Request": (
        "request_id sampling_params all_token_ids spec_token_ids max_tokens num_tokens num_output_tokens "
        "num_computed_tokens num_prompt_tokens is_prefill_chunk use_structured_output"
    ),
    "vllm.v1.executor.abstract:Executor": "get_class take_draft_token_ids",
    "vllm.v1.core.sched.output:SchedulerOutput": "scheduled_spec_decode_tokens num_scheduled_tokens scheduled_new_reqs",
}
"""Names of vLLM: methods that this module overrides, and attributes that it reads or sets."""


class DraftScheduler(Scheduler):
    """vLLM's scheduler with a draft tree per request, filled by the front: this project's server or pool."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._names: dict[str, str] = {}  # of our requests, by vLLM's id
        self._began = 0.0
        self._ended: float | None = None  # of the latest pass, if there was work ever since
        parallel = self.vllm_config.parallel_config
        self._waits = parallel.data_parallel_size == 1  # ranks of experts run in step: one that waits holds up all
        self._place, served = Place(**self.vllm_config.additional_config[KEY]), None
        self._is_owned, self._is_v2 = self._place.owned, self.vllm_config.use_v2_model_runner
        if self._is_owned:
            take_own_grammars()
        if not self._is_owned:
            require_kept(self.vllm_config)
            self._noise = noise_of(self.vllm_config, self._place.noise and Noise(self._place.noise))
            served = _served(self.vllm_config, self._noise)
            self._place = self._place.of_pool(served)
        self._own_names = map("{}.{}".format, itertools.repeat(secrets.token_hex(8)), itertools.count())
        self._speculates = self.vllm_config.speculative_config.method != METHOD  # vLLM itself does
        looks_up, num_bytes = self._place.lookup, self._place.answers_bytes
        self._drafts = Drafts(looks_up=looks_up, num_bytes=num_bytes, is_hidden=self._speculates)
        if not self._speculates:
            _ask_no_worker_for_drafts(self.vllm_config)
        self._link = Link(self._place, self._drafts.receive, self._drafts.requests, served)

    def add_request(self, request: Any) -> None:
        """Queue a request, and announce it to this project's server or pool, which then sends draft tokens for it."""
        asked = None
        if not self._is_owned and request.sampling_params is not None:
            name, limit = next(self._own_names), self.num_spec_tokens
            asked = adopted(request, self._noise, name, limit, chooses=not self._is_v2)
        self._ended = self._ended if self.running or self.waiting else None
        ours = _ours(request)
        if request.use_structured_output and (start := _moved_from(request)) is not None:
            feed_grammar(self.structured_output_manager, request, start)
        super().add_request(request)
        if ours is None or request.request_id not in self.requests or not (self._is_owned or asked):
            return
        name = ours["name"]
        self._names[request.request_id] = name
        gamma = min(ours["gamma"], self.num_spec_tokens)
        prompt = list(request.all_token_ids)[: ours["output_start"]]
        beside = {"origin": Origin(ours["owner"], prompt, ours["seed"]), "prediction": ours["prediction"]}
        self._link.send(self._drafts.enter(name, request.all_token_ids, gamma, asked, **beside))

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """Assign draft tokens to each request that is decoding, then let vLLM schedule the pass."""
        self._propose()
        self._began = time.monotonic()
        scheduled = super().schedule(*arguments, **options)
        for entered in scheduled.scheduled_new_reqs if self._is_v2 else ():
            if (start := _moved_from(self.requests[entered.req_id])) is not None:
                count_output_from(entered, start)
        return scheduled

    def _propose(self) -> None:
        if self._speculates:
            for request in self.running:
                if (ours := _ours(request)) is not None:
                    del request.spec_token_ids[ours["gamma"] :]
            return
        ready = [each for each in self.running if _decodes(each) and each.request_id in self._names]
        alone = len(ready) == len(self.running) and not self.waiting
        rooms = {self._names[each.request_id]: self._room(each) for each in ready}
        proposals = self._drafts.proposals(rooms, may_wait=self._waits and alone)
        self.update_draft_token_ids(DraftTokenIds([each.request_id for each in ready], proposals))

    def _room(self, request: Any) -> int:
        """Return how many draft tokens fit before a request's end; each pass adds a token of the target too."""
        left = request.max_tokens - request.num_output_tokens
        return min(left, self.max_model_len - request.num_tokens) - 1

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Let vLLM commit a pass; report the counts of its draft tokens before vLLM sends its tokens."""
        ended, drafts = time.monotonic(), scheduler_output.scheduled_spec_decode_tokens
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        # V2 counts them by row, and names requests by the numbers of rows: another request could fail.
        rows, finished, broken = [], [], {} if self._is_v2 else model_runner_output.num_nans_in_logits or {}
        chosen, places = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        for output in [output for client in outputs.values() for output in client.outputs]:
            request_id = output.request_id
            name, proposal = self._names.get(request_id), drafts.get(request_id, ())
            if name is not None and output.new_token_ids:
                accepted, is_finite = len(chosen[places[request_id]]) - 1, request_id not in broken
                rows.append(self._drafts.passed(name, output.new_token_ids, proposal, accepted, is_finite=is_finite))
            if output.finish_reason is not None:
                finished.append(request_id)
        if scheduler_output.num_scheduled_tokens:
            self._report(scheduler_output, ended, rows)
        for request_id in finished:
            self._leave(request_id)
        return outputs

    def _report(self, scheduled: Any, ended: float, rows: list[Row]) -> None:
        num_drafts = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        num_sessions, seconds = len(scheduled.num_scheduled_tokens), ended - self._began
        num_read = sum(scheduled.num_scheduled_tokens.values()) - num_sessions - num_drafts
        if not num_read:
            self._drafts.timed(num_sessions, num_drafts, seconds)
        before, self._ended = self._ended or ended, ended
        self._link.send(Passed(round(seconds * 1e6), num_read, len(self.running), rows, round((ended - before) * 1e6)))

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """End requests as vLLM does, then drop the draft tokens of all requests that vLLM no longer has."""
        finished = super().finish_requests(request_ids, finished_status)
        for request_id in [each for each in self._names if each not in self.requests]:
            self._leave(request_id)
        return finished

    def _leave(self, request_id: str) -> None:
        if (name := self._names.pop(request_id, None)) is not None:
            self._drafts.leave(name)
            if not self._is_owned:
                self._link.send(Gone(name))

    def shutdown(self) -> None:
        """Close the link on purpose, so that its end is not taken for a fault, and shut vLLM's scheduler down."""
        self._link.close()
        super().shutdown()


def _ask_no_worker_for_drafts(config: Any) -> None:
    """Make passes skip the call that asks workers for vLLM's own draft tokens; this process has no other engine."""
    Executor.get_class(config).take_draft_token_ids = lambda self: None


def _ours(request: Any) -> dict[str, Any] | None:
    """Return what this project has put into the `extra_args` of a vLLM request; None if there is nothing."""
    params = request.sampling_params
    return ((params.extra_args or {}) if params is not None else {}).get(KEY)


def _moved_from(request: Any) -> int | None:
    """Return the position of the first output token of a request that resumes a stream; None for all other requests."""
    ours = _ours(request)
    start: int | None = None if ours is None else ours["output_start"]
    return None if start == request.num_prompt_tokens else start


def _served(config: Any, noise: Noise) -> Served:
    """Describe the model in vLLM's configuration, for a pool of draft workers.

    Raises:
        ConfigError: it has no tokenizer that draft workers can read.
    """
    model = config.model_config
    try:
        tokenizer = cached_tokenizer_from_config(model)
        packed = Tokenizer(tokenizer, frozenset()).packed()
    except (AttributeError, ValueError, OSError) as exc:
        raise ConfigError(f"model {model.model}: draft workers need its fast tokenizer ({exc})") from exc
    if len(packed) > MAX_PACKED_BYTES:
        raise ConfigError(f"model {model.model}: its tokenizer has {len(packed)} bytes, above {MAX_PACKED_BYTES}")
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    sizes = model.get_vocab_size(), model.max_model_len, config.scheduler_config.max_num_seqs
    return Served(Path(model.model).name, packed, ends, *sizes, noise)


def _decodes(request: Any) -> bool:
    """Return whether a request has read all of its tokens but the last one, so that the next pass chooses a token."""
    return not request.is_prefill_chunk and request.num_computed_tokens == request.num_tokens - 1
