"""Our server against llama.cpp's over HTTP: `python -m benchmarks.llama_server`, or `make bench-llama`.

Both serve the bundled target in float32, greedy, with the same prompts and output lengths. compare_architectures.py
measures them as running endpoints: ours over gRPC and HTTP, ours fused with the bundled draft, and llama.cpp's, which
is built first (some ten minutes). The weights are equal, so the texts are compared, too: where two tokens are nearly as
likely, another arithmetic may choose the other one, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.llama_build import built_server
from benchmarks.llama_gguf import write_gguf
from comparison.app import main as compare
from inference.config import BUNDLED_DRAFT, BUNDLED_TARGET, ROOT
from inference.serving.processes import free_port

BUILD_FOLDER = ROOT / "build" / "llamacpp"
START_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama_server", description=__doc__)
    parser.add_argument("--build", type=Path, default=BUILD_FOLDER, help="where it is, or gets built (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("reports/llama"), help="of the report (%(default)s)")
    args, others = parser.parse_known_args()  # others are for compare_architectures.py
    llama, ours, fused = free_port(), (free_port(), free_port()), (free_port(), free_port())
    program = built_server(args.build)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        model = Path(folder) / "target.gguf"
        write_gguf(BUNDLED_TARGET, model)
        flags = ["-m", str(model), "-t", "1", "-c", "512", "-np", "1", "--port", str(llama), "--no-webui"]
        flags += ["--cache-type-k", "f32", "--cache-type-v", "f32"]  # as ours; its default is float16
        pair = ["--target_model", str(BUNDLED_TARGET), "--draft_model", str(BUNDLED_DRAFT)]
        with (
            _server([str(program), *flags], llama, "/health"),
            _server(_ours("target", ours, "--model", str(BUNDLED_TARGET)), ours[1], "/health"),
            _server(_ours("fused_target", fused, *pair), fused[1], "/health"),
        ):
            endpoints = {
                "llama.cpp": f"http://127.0.0.1:{llama}/v1",
                "ours": f"http://127.0.0.1:{ours[1]}/v1",
                "ours-grpc": f"grpc://127.0.0.1:{ours[0]}",
                "fused": f"http://127.0.0.1:{fused[1]}/v1",
            }
            asked = [f"--endpoint={name}={url}" for name, url in endpoints.items()]
            asked += ["--equal_weights", "--ignore_eos", "--output", str(args.output)]
            return compare([*asked, *others])


def _ours(role: str, ports: tuple[int, int], *flags: str) -> list[str]:
    where = ["--port", str(ports[0]), "--http_port", str(ports[1]), "--threads", "1", "--no-prefix_caching"]
    return [sys.executable, str(ROOT / "main.py"), "--role", role, *flags, *where]


@contextmanager
def _server(command: Sequence[str], port: int, path: str) -> Generator[None, None, None]:
    """Run a program that serves, until the block ends."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            asyncio.run(_until_ready(process, f"http://127.0.0.1:{port}{path}"))
            yield
        finally:
            process.terminate()
            process.wait()


async def _until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    async with asyncio.timeout(START_S):
        while process.poll() is None:
            try:
                with urllib.request.urlopen(url, timeout=1.0):  # noqa: ASYNC210 - no other task waits
                    return
            except (urllib.error.URLError, OSError):
                await asyncio.sleep(0.2)
    raise SystemExit(f"the server of {url} ended at start")


if __name__ == "__main__":
    sys.exit(main())
