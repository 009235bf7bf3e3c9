"""Conversation of one user with a model in a terminal: reads lines, obeys commands, shows answers as they come."""

from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing, suppress
from typing import cast

from rich.console import Console
from rich.text import Text

from specdec.inference.cli.chat.speakers import Messages, Speaker
from specdec.inference.errors import SpecDecError

HELP = """/system TEXT, /gamma N and /seed N hold from now on, and without a value no more.
/retry asks the last question again. Ctrl-C stops an answer, Ctrl-D leaves."""
STYLES = {(False, False): "", (False, True): "green", (True, False): "bright_black", (True, True): "dim green"}
"""Style, for rich, of a piece of an answer by whether it is a thought, and whether it is an accepted draft token's."""
CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")
"""Table for `str.translate` that replaces characters that could steer the terminal, all but tab and line feed."""


class Conversation:
    """Conversation so far, and the parameters for the next questions."""

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        self._console = Console()
        self._system: Messages = []
        self._turns: Messages = []
        self._asked = ""
        self._answering: asyncio.Task[None] | None = None
        self._options: dict[str, int] = {}

    async def run(self) -> None:
        """Read lines and answer them, until the end of the input."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
        self._say(HELP)
        with suppress(EOFError):
            while True:
                line = (await asyncio.to_thread(input, "> ")).strip()
                if question := self._command(line) if line.startswith("/") else line:
                    await self._answer(question)
        self._say("")

    def _interrupt(self) -> None:
        if self._answering:
            self._answering.cancel()
        else:
            self._say("\nCtrl-D leaves")

    def _command(self, line: str) -> str:
        """Obey a line that begins with a slash; return the question that it asks, or an empty text."""
        name, _, value = line.removeprefix("/").partition(" ")
        if name == "retry":
            if {"role": "user", "content": self._asked} in self._turns[-2:]:
                del self._turns[-2:]
            return self._asked
        if name == "system":
            self._system = [{"role": "system", "content": value}] if value else []
        elif name in ("gamma", "seed") and (not value or value.removeprefix("-").isdecimal()):
            self._options.pop(name, None)
            self._options |= {name: int(value)} if value else {}
        else:
            self._say(f"\n{HELP}")
        return ""

    async def _answer(self, question: str) -> None:
        """Ask a question and show the answer as it comes. Ctrl-C ends it; the text so far stays in the conversation."""
        self._asked, said = question, list[str]()
        asked = {"role": "user", "content": question}
        self._answering = task = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            async with aclosing(self._speaker([*self._system, *self._turns, asked], self._options)) as pieces:
                async for text, is_thought, is_accepted in pieces:
                    style = STYLES[is_thought, is_accepted]
                    self._console.out(text.translate(CONTROLS), style=style, end="", highlight=False)
                    said += [] if is_thought or not text else [text]
            self._say("")
        except asyncio.CancelledError:
            self._say("\nstopped")
            task.uncancel()
        except SpecDecError as exc:
            self._say(f"\nerror: {exc}", "red")
        finally:
            self._answering = None
        if said:
            self._turns += [asked, {"role": "assistant", "content": "".join(said)}]

    def _say(self, text: str, style: str = "bright_black") -> None:
        self._console.print(Text(text.translate(CONTROLS), style), soft_wrap=True)
