"""HTTP application: OpenAI's and Anthropic's endpoints, health, metrics and a web page.

It only translates between HTTP and a `Completer`, the object that answers requests; it generates no text itself.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_type_hints

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from specdec.grpc_comm.tls import ServerTls
from specdec.inference import VERSION
from specdec.inference.config import HttpConfig, ServerConfig, is_loopback
from specdec.inference.errors import SpecDecError
from specdec.inference.gateway.answers.documents import (
    ANSWERS,
    FAILURES,
    MESSAGES_FAILURES,
    JsonAnswer,
    model_document,
)
from specdec.inference.gateway.answers.errors import (
    MAX_ECHO_CHARACTERS,
    MESSAGES,
    ApiError,
    from_error,
    from_validation,
    unexpected,
    unreadable,
)
from specdec.inference.gateway.answers.formats import ChatFormat, ChunkFormat, CompletionFormat
from specdec.inference.gateway.answers.message import MessageReader
from specdec.inference.gateway.answers.messages_answer import MessagesFormat
from specdec.inference.gateway.answers.responses_answer import ResponsesFormat
from specdec.inference.gateway.answers.stream import (
    AnswerStream,
    EventStream,
    Kept,
    whole_answer,
)
from specdec.inference.gateway.bodies.audit import AuditBody
from specdec.inference.gateway.bodies.messages import MessagesBody
from specdec.inference.gateway.bodies.responses import ResponsesBody
from specdec.inference.gateway.bodies.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from specdec.inference.gateway.dialect import Dialect
from specdec.inference.gateway.door.middleware import BodyLimit, HttpGate, RequestId, StatusCount
from specdec.inference.gateway.door.port import HttpPort, Probes
from specdec.inference.gateway.requests import chat_requests, check_ids, completion_requests, events_of, max_numbers
from specdec.inference.observe.metrics import Metrics
from specdec.inference.text.chat import Chat
from specdec.inference.workers.calls.access import Access
from specdec.inference.workers.completing.audit import audited
from specdec.inference.workers.completion import Codec, Completer, CompletionRequest, ModelCard

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig  # vLLM's environment has a FastAPI without it

    from specdec.inference.observe.spans import Spans

logger = logging.getLogger(__name__)

DEADLINE_HEADER = "x-deadline-s"
PAGE = Path(__file__).with_name("page.html")
LIBRARY = Path(__file__).with_name("markdown-it.umd.min.js")
"""File of the Markdown parser that the web page runs as a script; markdown-it.LICENSE.txt has its licence."""
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src {scripts}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Content security policy of the web page: it may run its own scripts and reach its own server, but not turn texts
into HTML, and no other page may frame it."""
SPOKEN = (
    "POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/audit, GET /v1/models; Anthropic's /v1/messages"
)
"""List of this server's endpoints, as text for the error that a request for an unknown path gets."""
MAX_NAMES = 20
"""Most adapters that the error for an unknown model name lists."""
ANY_HOST = ("0.0.0.0", "::", "[::]")
"""Values of --host with which the server listens on all addresses of this machine."""
T = TypeVar("T")
Readers: TypeAlias = Callable[[str], MessageReader | None]
"""Function that takes a prompt's text and returns a reader, which splits the answer's text into reasoning, content and
tool calls; the function returns None if the answer can only be content."""


@dataclass(slots=True)  # not frozen: the card changes with the served model
class Gateway:
    """What the HTTP application uses to answer requests: completer, description of the model, and settings.

    Attributes:
        completer: completer that answers the requests.
        codec: converter of texts and token ids for clients; None if there is no tokenizer.
        card: description of the model that is served now.
        metrics: metrics that /metrics shows.
        is_healthy: function that returns whether requests can be served now.
        config: settings of the HTTP API.
        spans: source of a trace span for every request; None traces nothing.
        kept: counter of the log-probabilities that unfinished answers without a stream have in memory.
    """

    completer: Completer
    card: ModelCard
    metrics: Metrics
    is_healthy: Callable[[], Awaitable[bool]]
    config: HttpConfig = field(default_factory=HttpConfig)
    spans: Spans | None = None
    codec: Codec | None = None
    kept: Kept = field(default_factory=Kept)


def create_app(gateway: Gateway, access: Access | None = None) -> FastAPI:
    """Return the ASGI application that answers from `gateway`; `access` decides who may call it, None admits all."""
    telemetry = _telemetry(gateway.spans)
    app = FastAPI(title="specdec", version=VERSION, docs_url=None, redoc_url=None, telemetry=telemetry)
    _add_generation(app, gateway)
    _add_tokens(app, gateway)
    _add_operation(app, gateway)
    if not gateway.config.no_page:
        _add_page(app)
    _add_failures(app)
    max_bytes = round(gateway.config.max_body_mib * 2**20)
    app.add_middleware(BodyLimit, max_bytes=max_bytes, max_numbers=lambda: max_numbers(gateway.card))
    if access is not None:
        app.add_middleware(HttpGate, access=access)
    if origins := gateway.config.origins:  # outside the gate, as browsers send a preflight without its token
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_headers=["*"],
            allow_methods=["GET", "POST"],
            allow_private_network=True,
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    paths = frozenset(path for route in app.routes if (path := getattr(route, "path", None)))
    app.add_middleware(StatusCount, registry=gateway.metrics.registry, paths=paths)
    app.add_middleware(RequestId)  # the outermost: refusals have an id too
    return app


def _telemetry(spans: Spans | None) -> TelemetryConfig:
    """Return FastAPI's telemetry settings: trace spans of requests, but no metrics or logs.

    The spans continue the trace that a client's headers name. There are none if `spans` is None.
    """
    if spans is None:
        return {"tracing": False, "metrics": False, "logs": False}
    return {
        "tracer_provider": spans.provider,
        "metrics": False,
        "logs": False,
        "operation_spans": False,
        "exclude": _is_noise,
    }


def _is_noise(scope: MutableMapping[str, Any]) -> bool:
    """Return whether a request, such as a health check, gets no trace span: only POST requests below /v1/ get one."""
    return scope["method"] != "POST" or not scope["path"].startswith("/v1/")


def _add_generation(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/completions", responses=ANSWERS, response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Complete a prompt."""
        card = _named(body.model, gateway.card)
        return await _answer(gateway, request, body, completion_requests(body, card), CompletionFormat(card.name))

    @app.post("/v1/chat/completions", responses=ANSWERS, response_model=None)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        return await _answer_chat(gateway, request, body, ChatFormat)

    @app.post("/v1/responses", responses=ANSWERS, response_model=None)
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Answer a conversation, in the shape of OpenAI's Responses API."""
        return await _answer_chat(gateway, request, body.chat(), partial(ResponsesFormat, body=body))

    @app.post(MESSAGES, responses={**ANSWERS, **MESSAGES_FAILURES}, response_model=None)
    async def messages(body: MessagesBody, request: Request) -> Response:
        """Answer a conversation, in the shape of Anthropic's Messages API."""
        return await _answer_chat(gateway, request, body.chat(), MessagesFormat)

    @app.post(f"{MESSAGES}/count_tokens", responses=MESSAGES_FAILURES, response_model=None)
    async def count_tokens(body: MessagesBody) -> JsonAnswer:
        """Return the number of a conversation's tokens, in the shape of Anthropic's Messages API."""
        _named(body.model, gateway.card)
        return JsonAnswer({"input_tokens": len(await _codec(gateway).encode(body.chat().chat()))})

    @app.post("/v1/audit", responses=FAILURES, response_model=None)
    async def audit(body: AuditBody, request: Request) -> JsonAnswer:
        """Report for each token of an output whether it is the model's own choice."""
        asked = body.asked()
        if isinstance(asked, ChatBody):
            requests, name, _ = _chat(gateway, asked)
        else:
            card = _named(asked.model, gateway.card)
            requests, name = completion_requests(asked, card), card.name
        if body.index >= len(requests):
            raise ApiError(
                400, f"index {body.index} is not below {len(requests)}, the number of choices", param="index"
            )
        one = replace(requests[body.index], deadline=asyncio.get_running_loop().time() + _deadline_s(request, gateway))
        work = audited(gateway.completer, gateway.codec, one, body.output, body.near_tie)
        done = await unless_disconnected(request, work)
        return JsonAnswer({"object": "audit", "model": name, **done.as_json()})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served model and its adapters."""
        card = gateway.card
        adapters = (model_document(card.of_adapter(name), created=started, parent=card.name) for name in card.adapters)
        return {"object": "list", "data": [model_document(card, created=started), *adapters]}

    @app.get("/v1/models/{name:path}", responses=FAILURES)
    async def model(name: str) -> dict[str, Any]:
        """Return the model of this name."""
        card = _named(name, gateway.card)
        return model_document(card, created=started, parent=gateway.card.name if card.adapter else None)

    started = int(time.time())


async def _answer_chat(
    gateway: Gateway, request: Request, body: ChatBody, form: Callable[[str, Readers], AnswerStream]
) -> Response:
    requests, name, readers = _chat(gateway, body)
    return await _answer(gateway, request, body, requests, form(name, readers))


def _chat(gateway: Gateway, body: ChatBody) -> tuple[list[CompletionRequest], str, Readers]:
    """Return a chat's completion requests (one per choice), their model's name, and a function for reading answers.

    That function takes a prompt's text, and returns the reader that splits the answer into reasoning, content and tool
    calls, or None if the answer can only be content.

    Raises:
        ApiError, InvalidRequestError: no such model is served, or it cannot take such a conversation.
    """
    card = _named(body.model, gateway.card)
    dialect = Dialect.of(card, gateway.config)
    return chat_requests(body, card, dialect), card.name, partial(dialect.reader, body)


def _add_tokens(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/tokenize", responses=FAILURES, response_model=None)
    async def tokenize(body: TokenizeBody) -> JsonAnswer:
        """Return the token ids of a prompt, as generation would read it; in vLLM's form."""
        _named(body.model, gateway.card)
        token_ids = list(await _codec(gateway).encode(body.text(), special=body.add_special_tokens))
        counts = {"count": len(token_ids), "max_model_len": gateway.card.max_length}
        return JsonAnswer({**counts, "tokens": token_ids, "token_strs": None})

    @app.post("/detokenize", responses=FAILURES, response_model=None)
    async def detokenize(body: DetokenizeBody) -> JsonAnswer:
        """Return the text of token ids, in vLLM's form."""
        _named(body.model, gateway.card)
        check_ids(body.tokens, gateway.card, "tokens")
        return JsonAnswer({"prompt": await _codec(gateway).decode(body.tokens)})


def _codec(gateway: Gateway) -> Codec:
    if gateway.codec is None:
        raise ApiError(404, "this server has no tokenizer")
    return gateway.codec


def _named(name: str | None, card: ModelCard) -> ModelCard:
    """Return the card (description) of the model or adapter called `name`; `card` is the served model's.

    If `name` is None, or a path whose last part is the model's name, it means the model.

    Raises:
        ApiError: neither model nor adapter has this name.
    """
    if name is None or name.rstrip("/").rpartition("/")[2] == card.name.rpartition("/")[2]:
        return card
    if name in card.adapters:
        return card.of_adapter(name)
    served = ", ".join((card.name, *card.adapters[:MAX_NAMES]))
    message = f"model {name[:MAX_ECHO_CHARACTERS]} does not exist; {served} {'are' if card.adapters else 'is'} served"
    raise ApiError(404, message, param="model", code="model_not_found")


def _deadline_s(request: Request, gateway: Gateway) -> float:
    """Return the seconds that a request may take: the gateway's limit, or less if the request's X-Deadline-S says so.

    Raises:
        ApiError: the header is not a number of seconds above 0.
    """
    value = request.headers.get(DEADLINE_HEADER)
    if value is None:
        return gateway.config.deadline_s
    try:
        deadline_s = float(value)
    except ValueError:
        deadline_s = 0.0
    if not deadline_s > 0.0:
        raise ApiError(
            400,
            f"{DEADLINE_HEADER} {value} is not valid: a number of seconds above 0 is expected",
            param=DEADLINE_HEADER,
        )
    return min(deadline_s, gateway.config.deadline_s)


async def _answer(
    gateway: Gateway,
    request: Request,
    body: GenerationBody,
    requests: list[CompletionRequest],
    answer: AnswerStream,
) -> Response:
    if isinstance(answer, ChunkFormat):
        per_token = gateway.config.stream_chunk == "token"
        answer.expect(body, num_choices=len(requests), per_token=per_token)
        shown = requests[:: body.n] if body.return_token_ids else []
        answer.prompt_ids = [await _prompt_ids(gateway, each.prompt) for each in shown for _ in range(body.n)]
    deadline_s, ping_s = _deadline_s(request, gateway), gateway.config.sse_ping_s if body.stream else 0.0
    events = events_of(gateway.completer, requests, body, deadline_s=deadline_s, ping_s=ping_s)
    if isinstance(answer, MessagesFormat) and body.stops() and gateway.codec is not None:
        events = answer.noting_stop(events, body.stops(), gateway.codec)
    if not body.stream:
        return await unless_disconnected(request, whole_answer(events, answer, gateway.kept))
    first = await unless_disconnected(request, answer.begun(events))
    return EventStream(answer.chunks(first, events), events, deadline_s=deadline_s)


async def _prompt_ids(gateway: Gateway, prompt: str | tuple[int, ...] | Chat) -> tuple[int, ...]:
    return prompt if isinstance(prompt, tuple) else await _codec(gateway).encode(prompt)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; if the client disconnects first, cancel `work`, which frees its engine slot.

    Raises:
        ApiError: the client has disconnected.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(request))
    watcher.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        if not watcher.done() or watcher.cancelled():
            raise
        raise ApiError(499, "the client closed the connection", "client_closed_request") from None
    finally:
        watcher.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_operation(app: FastAPI, gateway: Gateway) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_class=Response, responses={503: {"description": "Not serving."}})
    async def health() -> Response:
        """Return 200 while requests can be served, else 503."""
        return Response(status_code=200 if await gateway.is_healthy() else 503)

    @app.post("/ping", include_in_schema=False)
    @app.get("/ping", response_class=Response, responses={503: {"description": "Not serving."}})
    async def ping() -> Response:
        """Answer like /health, at the path that SageMaker and vLLM's clients ask."""
        return await health()

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return the Prometheus metrics."""
        return Response(gateway.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Return this server's version, and its topology: target, fused, distributed or gateway."""
        return {"version": VERSION, "topology": gateway.card.topology}


def _add_page(app: FastAPI) -> None:
    library = LIBRARY.read_text(encoding="utf-8")
    document = PAGE.read_text(encoding="utf-8").replace("/* markdown-it */", library)
    scripts = re.findall("<script>(.*?)</script>", document, re.DOTALL)
    hashes = [f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts]
    headers = {
        "Content-Security-Policy": PAGE_POLICY.format(scripts=" ".join(hashes)),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(document, headers=headers)


def _half_a_pair(_: Request, error: UnicodeEncodeError) -> ApiError:
    """Return the error for a body with half of a surrogate pair, for which Pydantic cannot encode its own error."""
    half = error.object[error.start : error.end]
    return ApiError(400, f"{half!a} is half of a surrogate pair, which is not valid text", code="invalid_value")


def _not_valid(request: Request, error: RequestValidationError) -> ApiError:
    return from_validation(error, get_type_hints(request.scope["endpoint"])["body"])


_FAILURES: dict[type[Exception], Callable[[Request, Any], ApiError]] = {
    ApiError: lambda _, error: error,
    SpecDecError: lambda request, error: from_error(error, request.url.path),
    RequestValidationError: _not_valid,
    RecursionError: lambda *_: ApiError(400, "the body is nested too deeply", code="invalid_value"),
    UnicodeEncodeError: _half_a_pair,
    Exception: lambda *_: unexpected(),
}
"""Table from a type of exception to the function that makes the HTTP error for the client from it."""


async def _failed(failure: Callable[[Request, Any], ApiError], request: Request, error: Exception) -> JsonAnswer:
    return failure(request, error).answer(request.url.path)


def _add_failures(app: FastAPI) -> None:
    for kind, failure in _FAILURES.items():
        app.add_exception_handler(kind, partial(_failed, failure))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JsonAnswer:
        if isinstance(error.__cause__, UnicodeDecodeError):
            return unreadable(error.__cause__).answer(request.url.path)
        message = f"{request.method} {request.url.path[:MAX_ECHO_CHARACTERS]}: {error.detail}"
        if error.status_code == 404:
            at = "" if request.url.path.endswith("/messages") else "v1"  # Anthropic's clients add /v1 themselves
            message += f"; this server speaks OpenAI's API: {SPOKEN}; set base_url to {request.base_url}{at}"
        elif error.headers and "Allow" in error.headers:
            message += f"; {error.headers['Allow']} is expected"
            if request.method == "OPTIONS":
                message += "; web pages of other origins need --allowed_origins of this server"
        response = ApiError(error.status_code, message).answer(request.url.path)
        response.headers.update(error.headers or {})
        return response


class HttpFront(HttpPort):
    """HTTP port that serves the HTTP application of a `Gateway`.

    A `Host` (inference/serving/host.py), which runs a server's ports, opens and closes it.
    """

    def __init__(
        self, gateway: Gateway, server: ServerConfig, tls: ServerTls | None = None, access: Access | None = None
    ) -> None:
        self._gateway = gateway
        probes = Probes(create_app(gateway, access), lambda: gateway.is_healthy())
        super().__init__("HTTP", probes, gateway.config.port, server, tls)

    async def open(self) -> None:
        """Listen, and report to health checks that requests are accepted.

        Log the address of the web page, and a command to try the server with.
        """
        await super().open()
        server = self._server_config
        url = self._url("localhost" if is_loopback(server.host) or server.host in ANY_HOST else server.host)
        if not self._gateway.config.no_page:
            logger.info("a page to try it: %s/", url)
        keys = ["-H 'Authorization: Bearer TOKEN'"] if server.security.auth_file else []
        keys += ["--cacert CA"] if self._tls is not None else []
        body = '{"prompt": "Once upon a time", "max_tokens": 40}'
        logger.info(
            "a command to try it: curl %s",
            " ".join([f"{url}/v1/completions -H 'Content-Type: application/json'", *keys, f"-d '{body}'"]),
        )

    def show(self, card: ModelCard) -> None:
        """Present the model of `card` as the served one from now on, under --served_model_name if that is set."""
        self._gateway.card = card.named(self._gateway.config.served_model_name)
