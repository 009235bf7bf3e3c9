"""Smoke test inside an image: serves the bundled pair, requests a completion, and ends the server.

`make images` pipes this program to the image's Python; it uses only what is in the image.
"""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

from specdec.inference.cli.roles.registry import ROLES  # found in the folder of main.py, where the image starts

PORT = 18_000
URL = f"http://127.0.0.1:{PORT}"
PROMPT = "1, 2, 3, 4,"


def _get(path: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def _wait(server: "subprocess.Popen[bytes]", *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while server.poll() is None and time.monotonic() < end:
        try:
            _get("/readyz")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
        else:
            return
    raise SystemExit(f"the server is not ready (exit code {server.poll()})")


def main() -> int:
    """Run the test; return the server's exit code, which is 0 if it drained."""
    for role in ROLES:
        subprocess.run([sys.executable, "main.py", "--role", role, "--help"], check=True, stdout=subprocess.DEVNULL)
    started = time.monotonic()
    flags = ["--role", "fused_target", "--port", str(PORT + 1), "--http_port", str(PORT), "--log_level", "warning"]
    server = subprocess.Popen([sys.executable, "main.py", *flags])
    try:
        _wait(server, seconds=600)  # a machine may be busy
        print(f"ready after {time.monotonic() - started:.1f} s")
        answer = json.loads(_get("/v1/completions", {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}))
        print(f"{PROMPT!r} goes on {answer['choices'][0]['text']!r}, {answer['usage']}")
    finally:
        server.send_signal(signal.SIGTERM)
    return server.wait(timeout=30)


if __name__ == "__main__":
    sys.exit(main())
