"""Engine of a target that computes with vLLM: `VerificationEngine` in front of vLLM's `AsyncLLM`.

Tokens, log-probabilities and finish reasons come from vLLM. The counts of each pass come by the mailbox
(`mailbox.py`), before the tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.registry import Collector
from vllm import SamplingParams as VllmParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from specdec.inference.commit import Opened, TokenEvent
from specdec.inference.engine.grammars import Grammars
from specdec.inference.engine.target import EngineLimits, check_prompt
from specdec.inference.errors import CapacityError, InternalError, InvalidRequestError, UnavailableError
from specdec.inference.model.decoder import Matcher
from specdec.inference.request import GenerationRequest
from specdec.inference.vllm import runner_v1
from specdec.inference.vllm.frames import FromCore, Has, Passed
from specdec.inference.vllm.grammars import OWN_FORM
from specdec.inference.vllm.mailbox import Mailbox
from specdec.inference.vllm.session import Sessions, VllmSession
from specdec.inference.vllm.translation import KEY, carried, own_fields, scores

HOOKS = {
    "vllm.v1.engine.async_llm:AsyncLLM": ("from_vllm_config generate errored shutdown vllm_config model_config"),
    "vllm.outputs:RequestOutput": "outputs prompt_logprobs num_cached_tokens",
    "vllm.outputs:CompletionOutput": "token_ids logprobs finish_reason",
}
"""Names of vLLM: methods that this module and `serving/vllm_target.py` call, and attributes that they read."""
CORE_LOST = "vLLM's engine core has ended; its messages say why"
STOPPING = "the server is stopping"


class VllmMetrics(Collector):
    """Collector of vLLM's metrics, such as `vllm:kv_cache_usage_perc`, except for names that this project uses too.

    Args:
        ours: registry with this project's metrics.
    """

    def __init__(self, ours: CollectorRegistry) -> None:
        self._ours = {metric.name for metric in ours.collect()}

    def collect(self) -> Iterator[Metric]:
        """Yield vLLM's own metrics, for Prometheus."""
        yield from (
            each for each in REGISTRY.collect() if each.name.startswith("vllm:") and each.name not in self._ours
        )


class VllmEngine(Sessions):
    """The `VerificationEngine` over vLLM; the server's process watches whether it is healthy.

    Args:
        llm: vLLM's `AsyncLLM`, running.
        mailbox: mailbox that vLLM's engine cores have dialled.
        limits: only max_waiting, gamma, eos_token_ids, pass_timeout_s, noise and drafting are read; vLLM has the
            others.
        grammars: compiler of requests' grammars.

    Attributes:
        adapters: adapters that requests may name; vLLM keeps the cached prefixes of each apart.
    """

    def __init__(self, llm: Any, mailbox: Mailbox, limits: EngineLimits, grammars: Grammars) -> None:
        super().__init__(mailbox, limits.drafting)
        self._llm = llm
        self._mailbox.receive = self.receive
        self._limits = limits
        self._grammars = grammars
        self._is_stopping = False
        self._last_at = time.monotonic()
        self._idle = asyncio.Event()
        self.adapters: Mapping[str, LoRARequest] = {}
        config, model = llm.vllm_config, llm.model_config
        self.max_length, self.vocab_size = model.max_model_len, model.get_vocab_size()
        self.num_slots = config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size

    @property
    def num_running(self) -> int:
        """Return the number of requests in vLLM's passes; if memory is short, vLLM takes some requests out."""
        return min(sum(state.num_running for state in self._cores.values()), len(self._sessions))

    @property
    def num_waiting(self) -> int:
        return len(self._sessions) - self.num_running

    @property
    def broken(self) -> str | None:
        """Return why no request will ever be served again: vLLM's core was lost. None while the core is linked."""
        return CORE_LOST if self._llm.errored else None

    @property
    def hangs(self) -> bool:
        """Return whether requests are open, and vLLM has reported no pass for longer than a pass may take."""
        return bool(self._sessions) and time.monotonic() - self._last_at > self._limits.pass_timeout_s

    @property
    def fault(self) -> str | None:
        """Return why no requests are served at the moment; None if they are."""
        silent = f"vLLM has reported no pass for {self._limits.pass_timeout_s:g} s"
        return self.broken or (silent if self.hangs else None)

    async def stop(self, *, grace_s: float) -> None:
        """Take no new requests, let running ones finish for `grace_s` seconds, and fail the remaining ones.

        vLLM itself goes on: the context manager that started it stops it.
        """
        self._is_stopping = True
        if self._sessions:
            self._idle.clear()
            try:
                async with asyncio.timeout(grace_s):
                    await self._idle.wait()
            except TimeoutError:
                for session in list(self._sessions.values()):
                    session.fail(UnavailableError(STOPPING))

    async def compiled(self, request: GenerationRequest) -> Matcher | None:
        """Return the request's grammar, compiled; None if it has none.

        vLLM's cores compile it once more, in processes of their own.
        """
        return None if request.grammar is None else await self._grammars.matcher(request.grammar)

    def open(self, request: GenerationRequest, *, grammar: Matcher | None = None) -> VllmSession:
        """Queue a request; its session decodes without draft tokens until `begin_help` is called.

        Raises:
            InvalidRequestError: the prompt does not fit the model, or the request asks for an audit.
            CapacityError: too many requests are open.
            UnavailableError: the engine is stopping, or vLLM has ended.
        """
        check_prompt(request.prompt_token_ids, max_length=self.max_length, vocab_size=self.vocab_size)
        if request.audits:
            raise InvalidRequestError("audit: vLLM gives no scores of its choices; backends torch and onnx do")
        if (reason := STOPPING if self._is_stopping else self.broken) is not None:
            raise UnavailableError(reason)
        limit = self.num_slots + self._limits.max_waiting
        if len(self._sessions) >= limit:
            raise CapacityError(f"{limit} requests are open already", retry_after_s=1.0)
        if not self._sessions:
            self._last_at = time.monotonic()
        if request.stop_at_eos:
            request = replace(request, stop_token_ids=request.stop_token_ids | self._limits.eos_token_ids)
        request = replace(request, sampling=replace(request.effective_sampling(), noise=self._limits.noise))
        session = VllmSession(request, grammar)
        session.drafting = self.drafting
        self._sessions[session.id] = session
        return session

    def close(self, session: VllmSession) -> None:
        """Remove the session, so that it counts no longer as open; a second call has no effect."""
        super().close(session)
        if not self._sessions:
            self._idle.set()

    def receive(self, core: int, frame: FromCore | None) -> None:
        """Apply a message of an engine core: a request has arrived, or a pass has ended; None: the link has ended.

        `core` is the number of the core's link.
        """
        if frame is None:
            for each in self._sessions.values():
                each.reported.set()
        elif isinstance(frame, Has) and (session := self._sessions.get(frame.name)) is not None:
            session.core = core
            while session.early:
                self._send(session, session.early.pop(0))
        elif isinstance(frame, Passed):
            self._take(core, frame)

    def _take(self, core: int, passed: Passed) -> int:
        """Apply the report of a pass; return the number of its draft tokens."""
        self._last_at = time.monotonic()
        num_drafts = super()._take(core, passed)
        if self.timeline is not None:
            figures = {"sessions": len(passed.rows), "draft_tokens": num_drafts}
            self.timeline.span("pass", self._last_at - passed.us / 1e6, self._last_at, **figures)
        return num_drafts

    async def answer(self, session: VllmSession) -> AsyncGenerator[TokenEvent, None]:
        """Yield the session's `Opened` event, then its commits of tokens; closing the generator closes the session."""
        request = session.request
        prompt = tokens_input(list(request.prompt_token_ids), cache_salt=request.cache_salt or None)
        adapter = self.adapters[request.adapter] if request.adapter else None
        try:
            params = self._params(request, session.id)
            async with aclosing(self._llm.generate(prompt, params, session.id, lora_request=adapter)) as outputs:
                is_first = True
                while (output := await self._next(session, outputs)) is not None:
                    if is_first:
                        yield _opened(session, output)
                    is_first = False
                    await self._until_reported(session, len(output.outputs[0].token_ids))
                    _require_finite(session)
                    for commit in session.commits(output.outputs[0]):
                        yield commit
        except EngineDeadError as exc:
            raise UnavailableError(CORE_LOST) from exc
        except VLLMClientError as exc:
            raise InvalidRequestError(str(exc)) from exc
        except EngineGenerateError as exc:
            raise InternalError(f"vLLM failed on this request: {exc.__cause__!r}") from exc
        finally:
            self.close(session)

    def _params(self, request: GenerationRequest, name: str) -> VllmParams:
        max_tokens = min(request.max_new_tokens, self.max_length - len(request.prompt_token_ids))
        if self._llm.vllm_config.use_v2_model_runner:
            choice = own_fields(request, max_tokens)
            choice["extra_args"] = {KEY: carried(request, name, self._limits.gamma)}
        else:
            choice = runner_v1.greedy_fields(request, name, self._limits.gamma)
        if request.grammar is not None:
            source = OWN_FORM + self._grammars.source(request.grammar)
            choice["structured_outputs"] = StructuredOutputsParams(grammar=source)
        return VllmParams(
            max_tokens=max_tokens,
            stop_token_ids=sorted(request.stop_token_ids),
            ignore_eos=True,  # all ends are named: vLLM would add those of generation_config.json
            detokenize=False,
            logprobs=request.logprobs,
            output_kind=RequestOutputKind.DELTA,
            **choice,
        )

    async def _next(self, session: VllmSession, outputs: AsyncGenerator[Any, None]) -> Any:
        """Return vLLM's next output of a session, None after the last; raise the error that the session failed with."""
        if session.error is not None:
            raise session.error
        session.reading = task = asyncio.current_task()
        try:
            output: Any = await anext(outputs, None)
        except asyncio.CancelledError:
            if session.error is None or task is None or task.uncancel():  # its reader is cancelled, perhaps too
                raise
            raise session.error from None
        finally:
            session.reading = None
        if output is not None and output.outputs[0].finish_reason == "abort":
            raise UnavailableError(STOPPING)
        if output is not None and output.outputs[0].finish_reason == "error":
            raise InternalError("vLLM failed on this request")
        return output

    async def _until_reported(self, session: VllmSession, num_tokens: int) -> None:
        """Wait until reports of passes cover the session's next `num_tokens` tokens, or its engine core is lost.

        A core sends the report on a pass before the pass's tokens.
        """
        core = session.core or 0
        while sum(row.num_tokens for row, _ in session.rows) < num_tokens and self._mailbox.is_linked(core):
            session.reported.clear()
            await session.reported.wait()


def _require_finite(session: VllmSession) -> None:
    """Raise InternalError if a reported pass of the session had logits that were not finite."""
    for row, _ in session.rows:
        if not row.is_finite:
            raise InternalError(f"the model's logits are not finite at position {row.position} or soon after")


def _opened(session: VllmSession, output: Any) -> Opened:
    """Return the first event of a request, with the log-probabilities of its prompt if the request asks for them.

    Args:
        session: the request's session; its `num_cached_tokens` is set.
        output: vLLM's first output of the request.
    """
    request, count = session.request, session.request.prompt_logprobs
    session.num_cached_tokens = output.num_cached_tokens or 0
    if count is None or not output.prompt_logprobs:
        return Opened(session.num_cached_tokens)
    given = zip(request.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    scored = tuple(scores(token_id, entries, count) for token_id, entries in given)
    return Opened(session.num_cached_tokens, scored[: request.output_start - 1])
