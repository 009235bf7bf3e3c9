"""Cost of HTTP over direct gRPC: added time to the first token, added time per token, CPU per token.

    python -m benchmarks.gateway_overhead [--streams 16] [--tokens 64] [--gap_ms 10]

There is no model: a server writes scripted tokens, one per commit, every `gap_ms`, so that only transport is measured.
There are three ways to it: gRPC; HTTP of the same process (as `fused_target --http_port`); a `--role gateway` process
in front. `--streams` clients send one request after another, evenly spread over time; then all send at the same moment
(burst), where a request also waits for those before it. With gap 0 streams run as fast as they can, and the time per
token is that of the slowest part. CPU time is the figure that a busy machine spoils least. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from grpc_comm.channel import open_channel, wait_until_ready
from grpc_comm.server import Server
from inference.commit import Delta, Finished, FinishReason, Started, TextEvent, Timings
from inference.config import ROOT, HttpConfig, ServerConfig
from inference.gateway.app import Gateway
from inference.gateway.server import HttpFront
from inference.observe.metrics import Metrics
from inference.serving.host import opened
from inference.serving.processes import free_port
from inference.workers.completion import CompletionRequest, ModelCard
from inference.workers.generation import GenerationServicer
from inference.workers.observer import Observer
from inference.workers.remote import RemoteCompleter
from inference.workers.scope import SupervisedCompleter
from inference.workers.status import to_status

CARD = ModelCard("scripted", "target", 1 << 20, 1 << 16, "0")


@dataclass(frozen=True, slots=True)
class ScriptedCompleter:
    """Completer of one token per commit, every `gap_s` seconds."""

    gap_s: float

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[TextEvent, None]:
        """See `Completer`."""
        await asyncio.sleep(self.gap_s)
        yield Started(8, 1)
        num_tokens = request.max_new_tokens or 1
        for number in range(num_tokens):
            last = number == num_tokens - 1
            reason = FinishReason.LENGTH if last else None
            yield Delta(8 + number, (7,), 4, 0, Timings(compute_us=1000), reason, text=" word", piece_lengths=(5,))
            await asyncio.sleep(self.gap_s)
        yield Finished(FinishReason.LENGTH)


async def _always() -> bool:
    return True


async def _serve(grpc_port: int, http_port: int, gap_s: float) -> None:
    metrics = Metrics(CARD.name)
    completer = SupervisedCompleter(ScriptedCompleter(gap_s), Observer(metrics))
    server = Server(f"127.0.0.1:{grpc_port}", [GenerationServicer(completer, CARD)], status_of=to_status)
    await server.open()
    async with opened(
        HttpFront(Gateway(completer, CARD, metrics, _always, HttpConfig(http_port)), ServerConfig(grace_s=1.0))
    ):
        await asyncio.Event().wait()


def serve(grpc_port: int, http_port: int, gap_s: float) -> None:
    """Run the scripted server until it is killed."""
    uvloop.run(_serve(grpc_port, http_port, gap_s))


@dataclass(frozen=True, slots=True)
class Stream:
    """Times of one stream, in seconds."""

    ttft_s: float
    tpot_s: float


async def grpc_stream(completer: RemoteCompleter, num_tokens: int) -> Stream:
    """Send one request over gRPC."""
    sent, arrivals = time.perf_counter(), []
    async for event in completer.complete(CompletionRequest("x", max_new_tokens=num_tokens)):
        if isinstance(event, Delta):
            arrivals.append(time.perf_counter())
    return _stream(sent, arrivals)


async def http_stream(port: int, num_tokens: int) -> Stream:
    """Send one request over a bare socket, so that no client library is measured; connecting does not count."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": "x", "max_tokens": num_tokens, "stream": True}).encode()
    lines = (
        "POST /v1/completions HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(body)}",
    )
    head = "\r\n".join((*lines, "", ""))
    await asyncio.sleep(0.01)
    sent, arrivals = time.perf_counter(), []
    writer.write(head.encode() + body)
    while not (line := await reader.readline()).startswith(b"data: [DONE]"):
        if line.startswith(b"data: "):
            arrivals.append(time.perf_counter())
    writer.close()
    return _stream(sent, arrivals)


def _stream(sent: float, arrivals: list[float]) -> Stream:
    return Stream(arrivals[0] - sent, (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1))


OneStream = Callable[[], Awaitable[Stream]]


async def burst(one: OneStream, num_streams: int, num_rounds: int) -> list[Stream]:
    """Run rounds of streams that begin at the same moment."""
    streams: list[Stream] = []
    for _ in range(num_rounds):
        streams += await asyncio.gather(*(one() for _ in range(num_streams)))
    return streams


async def spread(one: OneStream, num_streams: int, num_rounds: int, *, stream_s: float) -> list[Stream]:
    """Run `num_streams` clients, each with one stream after another; `stream_s` is about how long one takes."""

    async def client(number: int) -> list[Stream]:
        await asyncio.sleep(stream_s * number / num_streams)
        return [await one() for _ in range(num_rounds)]

    return [stream for streams in await asyncio.gather(*map(client, range(num_streams))) for stream in streams]


async def load(one: OneStream, args: argparse.Namespace, gap_s: float, pid: int) -> dict[str, float]:
    """Return medians in milliseconds, and the CPU time of a process for each token of the spread streams."""
    at_once = await burst(one, args.streams, 2 + args.rounds // 2)  # the first round is the warm-up
    before = cpu_s(pid)
    streams = await spread(one, args.streams, args.rounds, stream_s=gap_s * args.tokens)
    return {
        "ttft_ms": statistics.median(stream.ttft_s for stream in streams) * 1e3,
        "tpot_ms": statistics.median(stream.tpot_s for stream in streams) * 1e3,
        "burst_ttft_ms": statistics.median(stream.ttft_s for stream in at_once[args.streams :]) * 1e3,
        "cpu_ms_per_token": (cpu_s(pid) - before) / (args.rounds * args.streams * args.tokens) * 1e3,
    }


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(args: argparse.Namespace, gap_s: float) -> dict[str, dict[str, float]]:
    """Return the figures of each way at one pace."""
    grpc_port, http_port, gateway_port = free_port(), free_port(), free_port()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(grpc_port, http_port, gap_s), daemon=True)
    server.start()
    address = f"127.0.0.1:{grpc_port}"
    command = [sys.executable, str(ROOT / "main.py"), "--role", "gateway", "--port", str(grpc_port)]
    async with open_channel(address) as channel:
        await wait_until_ready(channel, address, timeout_s=60)
        gateway = await asyncio.create_subprocess_exec(*command, "--http_port", str(gateway_port))
        try:
            await _until_listening(gateway_port)
            completer = RemoteCompleter(channel, address, deadline_s=600)
            ways: dict[str, tuple[OneStream, int]] = {
                "grpc": (lambda: grpc_stream(completer, args.tokens), server.pid or 0),
                "http_in_process": (lambda: http_stream(http_port, args.tokens), server.pid or 0),
                "gateway": (lambda: http_stream(gateway_port, args.tokens), gateway.pid),
            }
            return {name: await load(one, args, gap_s, pid) for name, (one, pid) in ways.items()}
        finally:
            gateway.terminate()
            await gateway.wait()
            server.terminate()
            server.join()


async def _until_listening(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                writer.close()
                return


async def run(args: argparse.Namespace) -> None:
    """Measure both paces, print a table, and a line of JSON last."""
    results = {}
    for pace, gap_s in (("paced", args.gap_ms / 1e3), ("flat_out", 0.0)):
        figures = results[pace] = await measure(args, gap_s)
        print(f"{pace}: {args.streams} streams of {args.tokens} tokens, a token every {gap_s * 1e3:g} ms")
        for name, row in figures.items():
            added = {key: row[key] - figures["grpc"][key] for key in ("ttft_ms", "tpot_ms", "burst_ttft_ms")}
            print(
                f"  {name:16} TTFT {row['ttft_ms']:7.2f} ms ({added['ttft_ms']:+.2f}), "
                f"in a burst {row['burst_ttft_ms']:7.2f} ms ({added['burst_ttft_ms']:+.2f})   "
                f"per token {row['tpot_ms']:7.3f} ms ({added['tpot_ms']:+.3f})   "
                f"server CPU per token {row['cpu_ms_per_token']:.3f} ms"
            )
    print(json.dumps({"streams": args.streams, "tokens": args.tokens, "load": os.getloadavg()[0], **results}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gap_ms", type=float, default=10.0)
    uvloop.run(run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
