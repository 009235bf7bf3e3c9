"""Ordinary server of this project as a child process: started, asked for its load, drained, and never orphaned."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc

from specdec.grpc_comm.channel import open_channel
from specdec.grpc_comm.specdec.v1 import specdec_pb2 as pb
from specdec.grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from specdec.inference.config import PLAIN, ROOT, DialSecurity, address
from specdec.inference.workers.calls.dialling import credentials_of

CALL_S = 10.0
"""Timeout of a call to the child, in seconds."""
PROBE_S = 5.0
"""Timeout of a probe, in seconds."""
DRAIN_S = 40.0
"""Seconds that the child may take to end, with room for a `--grace_s` of 30 s."""


class ChildEndedError(Exception):
    """Unexpected end of the child process."""


class Child:
    """Running `main.py`, ready for requests. Its stdin is a lifeline: the server drains when the supervisor ends."""

    def __init__(self, process: subprocess.Popen[bytes], ready: dict[str, Any], security: DialSecurity) -> None:
        self._process = process
        self.ports: dict[str, int] = ready["ports"]
        self._host: str = ready["host"]
        self.address = address(self._host, self.ports["grpc"]) if "grpc" in self.ports else None
        self._channel = None if self.address is None else open_channel(self.address, credentials_of(security))

    @classmethod
    async def start(cls, role: str, flags: Sequence[str], security: DialSecurity = PLAIN) -> Child:
        """Start a server and wait until its ports are open, for as long as its model takes to load.

        Raises:
            ChildEndedError: the server ended first; its output, in the supervisor's log, has the reason.
        """
        words = [sys.executable, str(ROOT / "main.py"), "--role", role, "--probe_port", "0", *flags]
        words += ["--lifeline", "stdin", "--ready_json"]
        # No preexec_fn, and so no fork() under gRPC's threads. The child leads a session: over vLLM it would start
        # another process that does, and `kill` would miss it.
        process = await asyncio.to_thread(
            subprocess.Popen[bytes], words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        try:
            line = await asyncio.to_thread(process.stdout.readline)
            if not line:
                code = await asyncio.to_thread(process.wait)
                raise ChildEndedError(f"{role} ended with code {code} before it was ready")
            return cls(process, json.loads(line), security)
        except BaseException:
            process.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> int:
        """Wait for the child's end; return its exit code."""
        return await asyncio.to_thread(self._process.wait)

    async def is_alive(self) -> bool:
        """Return whether the child answers its liveness probe within `PROBE_S`."""
        return await asyncio.to_thread(self._probe)

    def _probe(self) -> bool:
        connection = http.client.HTTPConnection(self._host, self.ports["probes"], timeout=PROBE_S)
        try:
            connection.request("GET", "/livez")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """Kill a child that does not answer; `ended` then returns."""
        self._process.kill()

    async def load(self) -> pb.GetLoadResponse:
        """Return the load of the child.

        Raises:
            grpc.aio.AioRpcError: the child does not answer.
        """
        stub = rpc.GenerationServiceStub(self._channel)
        load: pb.GetLoadResponse = await stub.GetLoad(pb.GetLoadRequest(), timeout=CALL_S)
        return load

    async def drain(self) -> int:
        """Drain the child as on SIGTERM, kill it if it does not end in time, and return its exit code."""
        if self._channel is not None:
            try:
                await rpc.GenerationServiceStub(self._channel).Drain(pb.DrainRequest(), timeout=CALL_S)
            except grpc.aio.AioRpcError as exc:  # refused off loopback without an auth file: closing stdin drains it
                if exc.code() == grpc.StatusCode.DEADLINE_EXCEEDED:  # it hangs, and would not drain either
                    self._process.kill()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            async with asyncio.timeout(DRAIN_S):
                return await self.ended()
        except TimeoutError:
            self._process.kill()
            return await self.ended()
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()
            if self._channel is not None:
                await self._channel.close()
