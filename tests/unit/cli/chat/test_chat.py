"""`specdec chat` in a pseudo-terminal, at servers that it reaches by gRPC or by a URL of HTTP."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from specdec.inference.errors import InvalidRequestError
from specdec.inference.text.chat import Chat, ChatMessage
from specdec.testing import ScriptedCompleter, Served, serving

pytestmark = pytest.mark.slow
MAIN = Path(__file__).parents[4] / "main.py"
GREEN, GREY, PLAIN = "\x1b[32m", "\x1b[90m", "\x1b[0m"
THOUGHT = [["<think>", "Hm", "</think>"], ["Hel", "lo", " there", "."]]
"""An answer in two passes; in each pass all tokens but the last are accepted draft tokens."""


class Terminal:
    """A pseudo-terminal in which `specdec chat` runs."""

    def __init__(self, *flags: str) -> None:
        mine, theirs = pty.openpty()
        self._mine, self.seen = mine, ""
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "NO_COLOR": ""}
        command = [sys.executable, str(MAIN), "--role", "chat", *flags]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)

    def until(self, text: str, *, timeout_s: float = 60.0) -> str:
        """Read on until the terminal shows `text`; return what it has shown since the last call."""
        ends = time.monotonic() + timeout_s
        while text not in self.seen:
            assert time.monotonic() < ends, f"{text!r} is not in {self.seen!r}"
            if select.select([self._mine], [], [], 1.0)[0]:
                try:
                    self.seen += os.read(self._mine, 65536).decode(errors="replace")
                except OSError:  # Linux reports the end of a terminal so
                    raise AssertionError(f"{text!r} is not in {self.seen!r}, which has ended") from None
        shown, _, self.seen = self.seen.partition(text)
        return shown + text

    def type(self, text: str) -> None:
        os.write(self._mine, text.encode())

    def ask(self, line: str, until: str) -> str:
        """Type a line at the prompt; return all that the terminal shows up to the text `until`."""
        self.until("> ")
        self.type(f"{line}\n")
        return self.until(until)

    def leave(self) -> None:
        """Press Ctrl-D at the prompt; the program must end with exit code 0."""
        self.until("> ")
        self.type("\x04")
        assert self.process.wait(60) == 0


@contextmanager
def chat(*flags: str) -> Generator[Terminal, None, None]:
    terminal = Terminal(*flags)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal._mine)


def flags_of(served: Served, way: str) -> tuple[str, ...]:
    host, _, port = served.address.rpartition(":")
    return ("--url", served.url) if way == "url" else ("--target_host", host, "--port", port)


def messages_of(completer: ScriptedCompleter) -> list[tuple[str, str]]:
    prompt = completer.requests[-1].prompt
    assert isinstance(prompt, Chat)
    return [(each.role, each.content) for each in prompt.messages]


@pytest.mark.parametrize("way", ["grpc", "url"])
def test_a_conversation_keeps_its_history_and_obeys_commands(way: str) -> None:
    completer = ScriptedCompleter([["Hel", "lo", "."]])
    with serving(completer) as served, chat(*flags_of(served, way)) as terminal:
        shown = terminal.ask("Hi [bold]you[/bold]", ".\r\n")
        assert f"{GREEN}Hel{PLAIN}{GREEN}lo{PLAIN}.".replace(PLAIN + GREEN, "") in shown.replace(PLAIN + GREEN, "")
        assert messages_of(completer) == [("user", "Hi [bold]you[/bold]")]
        terminal.ask("/system Be short.", "\r\n")
        terminal.ask("/gamma 3", "\r\n")
        terminal.ask("/seed 7", "\r\n")
        terminal.ask("And now?", ".\r\n")
        first = [("user", "Hi [bold]you[/bold]"), ("assistant", "Hello.")]
        assert messages_of(completer) == [("system", "Be short."), *first, ("user", "And now?")]
        request = completer.requests[-1]
        assert (request.seed, request.gamma) == (7, 3)
        terminal.ask("/gamma", "\r\n")
        terminal.ask("/system", "\r\n")
        terminal.ask("/retry", ".\r\n")
        assert messages_of(completer) == [*first, ("user", "And now?")], "the answer before is dropped"
        assert (completer.requests[-1].seed, completer.requests[-1].gamma) == (7, None)
        assert "/retry asks" in terminal.ask("/gama 3", "leaves.")
        assert "/retry asks" in terminal.ask("/seed x", "leaves.")
        assert len(completer.requests) == 3
        terminal.leave()


@pytest.mark.parametrize("way", ["grpc", "url"])
def test_errors_of_the_server_are_shown_and_the_conversation_goes_on(way: str) -> None:
    completer = ScriptedCompleter([], error=InvalidRequestError("gamma 65 is above 64", field="gamma"))
    with serving(completer) as served, chat(*flags_of(served, way)) as terminal:
        terminal.ask("Well?", "gamma 65 is above 64")
        terminal.ask("/retry", "gamma 65 is above 64")
        assert messages_of(completer) == [("user", "Well?")]
        terminal.leave()


@pytest.mark.parametrize("way", ["grpc", "url"])
def test_ctrl_c_stops_the_answer_and_at_the_prompt_nothing(way: str) -> None:
    """Ctrl-C at the prompt does not end `specdec chat`, and the next line is answered.

    During an answer Ctrl-C stops the answer, and the text so far stays in the conversation.
    """
    completer = ScriptedCompleter([["Hel", "lo"]])
    completer.hangs = True
    with serving(completer) as served, chat(*flags_of(served, way)) as terminal:
        terminal.until("> ")
        os.killpg(terminal.process.pid, signal.SIGINT)
        terminal.until("Ctrl-D leaves")
        terminal.type("Go on\n")
        for line in ("And on", ""):
            terminal.until("lo")
            os.killpg(terminal.process.pid, signal.SIGINT)
            terminal.until("stopped")
            terminal.ask(line, "\n") if line else None
        assert messages_of(completer) == [("user", "Go on"), ("assistant", "Hello"), ("user", "And on")]
        terminal.leave()


def test_thoughts_are_grey_and_stay_out_of_the_history() -> None:
    completer = ScriptedCompleter(THOUGHT)
    with serving(completer) as served, chat(*flags_of(served, "grpc")) as terminal:
        shown = re.sub(r"\x1b\[2;32m", GREY, terminal.ask("Hi", ".\r\n"))
        assert f"{GREY}Hm" in shown
        assert "think>" not in shown
        terminal.ask("So?", ".\r\n")
        assert messages_of(completer)[1] == ("assistant", "Hello there.")
        terminal.leave()


class Foreign(BaseHTTPRequestHandler):
    """Server of OpenAI's API, as another project has it: refuses unknown fields, sends thoughts as `reasoning`."""

    asked: list[dict[str, Any]] = []

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"data": [{"id": "one"}, {"id": "two"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body.keys() - {"model", "messages", "stream"}:
            self.send_error(400)
            return
        deltas = [{"role": "assistant"}, {"reasoning": "Hm"}, {"content": "\x1b]0;title\x07Good"}, {}]
        events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas] + ['{"choices": []}', "[DONE]"]
        self._send("text/event-stream", "".join(f": ping\n\ndata: {event}\n\n" for event in events))

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def test_another_projects_server_gets_no_field_of_ours_and_cannot_steer_the_terminal() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        with chat("--url", url, "--served_model_name", "two") as terminal:
            shown = terminal.ask("Hi", "Good")
            assert f"{GREY}Hm{PLAIN}" in shown
            assert "\x1b]0" not in shown
            assert Foreign.asked[-1]["model"] == "two"
            assert "400" in terminal.ask("/gamma 3\nAgain", "answers 400")
            terminal.leave()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("localhost:8000", "is not valid"),
        ("http://192.0.2.1/v1", "in plain text"),
        ("http://127.0.0.1:9/v1", "no answer as OpenAI's API has it"),
    ],
)
def test_a_wrong_url_is_one_line(url: str, fault: str) -> None:
    command = [sys.executable, str(MAIN), "--role", "chat", "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, input="")
    assert done.returncode != 0
    assert fault in done.stderr
    assert done.stderr.count("\n") == 1


def test_messages_without_a_terminal_come_from_a_pipe() -> None:
    completer = ScriptedCompleter([["Yes", "."]])
    with serving(completer) as served:
        command = [sys.executable, str(MAIN), "--role", "chat", *flags_of(served, "grpc")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, input="One?\nTwo?\n", check=True)
    assert done.stdout.count("Yes.") == 2
    assert "\x1b" not in done.stdout
    assert completer.requests[-1].prompt == Chat(
        (ChatMessage("user", "One?"), ChatMessage("assistant", "Yes."), ChatMessage("user", "Two?"))
    )
