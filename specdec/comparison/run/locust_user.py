"""Locust user of GenerationService, on gevent: sends serialized requests, and keeps answers as the bytes received.

compare_architectures.py runs it headless with a plan (see comparison/run/load.py). To run it with Locust's page:

    locust -f comparison/run/locust_user.py --plan plan.json --results results.json

Imports neither torch nor the project's asyncio code: gevent must not share a process with them.
"""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from collections import deque
from pathlib import Path
from typing import Any

import gevent
import grpc
import grpc.experimental
import grpc.experimental.gevent as grpc_gevent
from locust import User, events, task
from locust.exception import StopUser

from specdec.grpc_comm.options import CHANNEL_OPTIONS
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc

grpc_gevent.init_gevent()  # before any channel exists; importing locust has patched the standard library

CONNECT_TIMEOUT_S = 10.0
GENERATE = "/specdec.v1.GenerationService/Generate"
NATIVE_THREADS = 10
READ_BY_THE_USER = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)
"""Channel option by which the greenlet that waits for a message reads it itself, without a second greenlet."""


class Load:
    """Requests that Locust's users are to send, and the records of those that have been sent.

    Args:
        plan: `address` (HOST:PORT), `deadline_s`, and `requests`: for each the number of its prompt, and its serialized
            message in base64. comparison/run/load.py writes it.
        results_file: file into which `write` writes the records.

    Attributes:
        records: for each request that has ended, the arguments of `record_of_messages` in load.py; here the messages
            are bytes, which `write` encodes in base64.
        errors: failures of users to connect.
        begun: CPU time and clock (see `_clocks`) when the first request was sent.
        waiting: those of the requests of `plan` that are still to be sent.
    """

    def __init__(self, plan: dict[str, Any], results_file: Path) -> None:
        self.plan = plan
        self.records: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.begun = _clocks()
        self._results_file = results_file
        self.waiting: deque[tuple[int, str]] = deque(plan["requests"])

    @property
    def is_complete(self) -> bool:
        return bool(self.errors) or len(self.records) == len(self.plan["requests"])

    def write(self) -> None:
        cpu_s, wall_s = (now - begun for now, begun in zip(_clocks(), self.begun, strict=True))
        for record in self.records:
            record["messages"] = [(at_s, b64encode(message).decode()) for at_s, message in record["messages"]]
        results = {"records": self.records, "errors": self.errors, "client_share": cpu_s / (wall_s or 1.0)}
        self._results_file.write_text(json.dumps(results))


def _clocks() -> tuple[float, float]:
    """Return the CPU time of this process, and the time of a monotonic clock, both in seconds."""
    return time.process_time(), time.monotonic()


@events.init_command_line_parser.add_listener
def _add_flags(parser: Any) -> None:
    parser.add_argument("--plan", required=True, metavar="FILE", help="JSON: address, requests and how to sample")
    parser.add_argument("--results", required=True, metavar="FILE", help="where the records go")


@events.init.add_listener
def _load(environment: Any, **_: Any) -> None:
    options = environment.parsed_options
    # A waiting call holds a native thread, of which gevent's default is ten.
    gevent.get_hub().threadpool.maxsize = NATIVE_THREADS + 2 * int(options.num_users or 1)
    environment.load = Load(json.loads(Path(options.plan).read_text()), Path(options.results))


@events.quitting.add_listener
def _write(environment: Any, **_: Any) -> None:
    environment.load.write()


class GenerationUser(User):
    """Thin client that sends the next request as soon as its last one is answered."""

    def on_start(self) -> None:
        plan = self.environment.load.plan
        self._channel = grpc.insecure_channel(plan["address"], options=[*CHANNEL_OPTIONS, READ_BY_THE_USER])
        self._generate = self._channel.unary_stream(GENERATE)  # bytes to bytes: messages are read after the load
        try:
            # Connect before the clock runs. Not channel_ready_future: it waits on a thread, which gevent never runs.
            rpc.GenerationServiceStub(self._channel).GetModel(
                pb.GetModelRequest(), timeout=CONNECT_TIMEOUT_S, wait_for_ready=True
            )
        except grpc.RpcError as exc:
            self._fail(exc)
            raise StopUser from exc

    def on_stop(self) -> None:
        self._channel.close()

    @task
    def complete(self) -> None:
        load = self.environment.load
        if not load.waiting:
            raise StopUser
        if len(load.waiting) == len(load.plan["requests"]):
            load.begun = _clocks()
        index, prompt = load.waiting.popleft()
        request, messages = b64decode(prompt), list[tuple[float, bytes]]()
        record = {"prompt_index": index, "sent_s": (sent_s := time.monotonic()), "messages": messages, "error": None}
        try:
            for message in self._generate(request, timeout=float(load.plan["deadline_s"])):
                messages.append((time.monotonic() - sent_s, message))
            self._report(messages[-1][0] if messages else 0.0, len(messages), None)
        except grpc.RpcError as exc:
            record["error"] = exc.code().name, exc.details(), time.monotonic() - sent_s
            self._report(0.0, 0, exc)
        load.records.append(record)
        if load.is_complete:
            self._end()

    def _end(self) -> None:
        """End the load from a new greenlet: quitting kills the users' greenlets, and this one must outlive them."""
        gevent.spawn(self.environment.runner.quit)

    def _fail(self, error: grpc.RpcError) -> None:
        """End the load because a user cannot connect: fewer requests than planned would be in flight."""
        self.environment.load.errors.append(f"{error.code().name}: {error.details()}")
        self._report(0.0, 0, error)
        self._end()

    def _report(self, seconds: float, size: int, error: Exception | None) -> None:
        """Report a request to Locust, for its own statistics and its web page.

        Args:
            seconds: time from sending to the last message; 0 after a failure.
            size: number of messages of the answer.
            error: failure; None if the request was answered.
        """
        self.environment.events.request.fire(
            request_type="grpc",
            name="Generate",
            response_time=seconds * 1e3,
            response_length=size,
            exception=error,
            context={},
        )
