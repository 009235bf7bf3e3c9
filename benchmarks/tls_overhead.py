"""Cost of TLS and tokens per message: unary calls, and messages back and forth on a stream, over loopback.

    python -m benchmarks.tls_overhead [--calls 2000] [--rounds 5]

There is no model: servers in a process of their own answer at once, in plain text, with TLS, with TLS and a token, and
with client certificates. The ways take turns in each round. Ends with one line of JSON: medians in microseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import grpc
import uvloop

from grpc_comm.call import Call
from grpc_comm.channel import open_channel, wait_until_ready
from grpc_comm.guard import Gate
from grpc_comm.secured import Credentials, watched_token
from grpc_comm.server import Server
from grpc_comm.specdec.v1 import specdec_pb2 as pb
from grpc_comm.specdec.v1 import specdec_pb2_grpc as rpc
from grpc_comm.tls import ClientTls, ServerTls
from inference.cli.trial import CLIENT_NAME, make_trial
from inference.serving.processes import free_port
from inference.workers.calls.access import Access
from inference.workers.calls.admitting import admission
from inference.workers.calls.status import to_status

TOKEN = "a-token-for-this-run"
WAYS = ("plain", "tls", "tls_token", "mtls")


class Echo(rpc.VerificationServiceServicer):  # type: ignore[misc]
    """Service that answers each proposal with a commit."""

    service_name = "specdec.v1.VerificationService"
    max_request_bytes = 10_000

    def add_to(self, server: grpc.aio.Server) -> None:
        """See `Servicer`."""
        rpc.add_VerificationServiceServicer_to_server(self, server)

    async def Assist(self, _: object, call: Call) -> None:
        """Write a message for each message."""
        while await call.read() != grpc.aio.EOF:
            await call.write(pb.AssistResponse(commit=pb.AssistCommit(commit=pb.Commit(token_ids=[1, 2, 3]))))


async def _serve(folder: Path, ports: dict[str, int]) -> None:
    tls = ServerTls(folder / "server.pem", folder / "server.key", folder / "ca.pem")
    admit = admission(Access(folder / "auth.toml"))
    gates = {
        "plain": Gate(admit=admission(Access())),
        "tls": Gate(tls.grpc_credentials(), admit=admission(Access())),
        "tls_token": Gate(tls.grpc_credentials(), admit=admit),
        "mtls": Gate(tls.grpc_credentials(client_certificates=True), admit=admit),
    }
    servers = [
        Server(f"127.0.0.1:{ports[way]}", [Echo()], status_of=to_status, gate=gate) for way, gate in gates.items()
    ]
    for server in servers:  # `servers` keeps them alive
        await server.open()
    await asyncio.Event().wait()


def serve(folder: Path, ports: dict[str, int]) -> None:
    """Run all servers until killed."""
    uvloop.run(_serve(folder, ports))


def prepare(folder: Path) -> dict[str, Credentials | None]:
    """Write certificates and tokens for both sides; return the credentials of each way."""
    make_trial(folder, "127.0.0.1")
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    (folder / "token").write_text(TOKEN)
    (folder / "auth.toml").write_text(
        f'[[token]]\nname = "a"\nsha256 = "{digest}"\nroles = ["worker"]\n'
        f'[[certificate]]\nname = "b"\nsan = "{CLIENT_NAME}"\nroles = ["worker"]\n'
    )
    tls, token = ClientTls(folder / "ca.pem"), watched_token(folder / "token")
    mtls = ClientTls(folder / "ca.pem", folder / "client.pem", folder / "client.key")
    return {"plain": None, "tls": Credentials(tls), "tls_token": Credentials(tls, token), "mtls": Credentials(mtls)}


async def unary_us(channel: grpc.aio.Channel, num_calls: int) -> float:
    """Return the microseconds of a call that opens a stream, sends one message and reads one."""
    stub, took = rpc.VerificationServiceStub(channel), []
    for _ in range(num_calls):
        began = time.perf_counter()
        call = stub.Assist(iter([pb.AssistRequest()]))
        await call.read()
        await call.code()
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


async def message_us(channel: grpc.aio.Channel, num_messages: int) -> float:
    """Return the microseconds of a message and its answer on one stream."""
    call, took = rpc.VerificationServiceStub(channel).Assist(), []
    for _ in range(num_messages):
        began = time.perf_counter()
        await call.write(pb.AssistRequest(propose=pb.AssistPropose(propose=pb.Propose())))
        await call.read()
        took.append(time.perf_counter() - began)
    call.cancel()
    return statistics.median(took) * 1e6


async def measured(args: argparse.Namespace, dials: dict[str, Credentials | None], ports: dict[str, int]) -> None:
    """Measure all ways in turns; print a table, and a line of JSON last."""
    figures: dict[str, dict[str, list[float]]] = {way: {"call": [], "message": []} for way in WAYS}
    channels = {way: open_channel(f"127.0.0.1:{ports[way]}", dials[way]) for way in WAYS}
    for way, channel in channels.items():
        keys = dials[way]
        tls = None if keys is None else keys.tls
        await wait_until_ready(channel, f"127.0.0.1:{ports[way]}", timeout_s=30, tls=tls)
        await unary_us(channel, 100)
    for _ in range(args.rounds):
        for way, channel in channels.items():
            figures[way]["call"].append(await unary_us(channel, args.calls))
            figures[way]["message"].append(await message_us(channel, args.calls))
    table = {way: {kind: round(min(row), 1) for kind, row in kinds.items()} for way, kinds in figures.items()}
    for way, row in table.items():
        print(f"{way:10} a call {row['call']:7.1f} us, a message and its answer {row['message']:7.1f} us")
    print(json.dumps({"calls": args.calls, "rounds": args.rounds, "load": os.getloadavg()[0], **table}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    args, ports = parser.parse_args(), {way: free_port() for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        dials = prepare(Path(name))
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(Path(name), ports), daemon=True)
        server.start()
        try:
            uvloop.run(measured(args, dials, ports))
        finally:
            server.terminate()
            server.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
