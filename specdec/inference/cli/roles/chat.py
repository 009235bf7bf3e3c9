"""Role chat: a conversation in the terminal, with a server of this project or any OpenAI-compatible one."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.inference.config import SERVICE_FLAGS, ConnectionConfig, HttpConfig, ObserveConfig
from specdec.inference.settings import group, same, setting


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings of --role chat, which holds a conversation with a server in the terminal.

    Attributes:
        url: base URL of an OpenAI-compatible API, such as http://localhost:8000/v1, in place of --target_host.
    """

    connection: ConnectionConfig = group(ConnectionConfig)
    url: str | None = setting(None, "--url URL", section="chat")
    model: str | None = same(
        HttpConfig, "served_model_name", help="model at --url (default: its first)", section="chat"
    )
    observe: ObserveConfig = group(
        ObserveConfig, role="chat", without=(*SERVICE_FLAGS, "trace", "profile"), log_level="warning"
    )


async def run(settings: ChatSettings) -> int:
    """Hold a conversation in the terminal until the input ends; return exit code 0."""
    from contextlib import suppress
    from functools import partial

    from specdec.inference.cli.chat.conversation import Conversation
    from specdec.inference.cli.chat.speakers import ask_server
    from specdec.inference.serving.edge import edge

    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history, and keys that edit a line
    if settings.url is None:
        async with edge(settings.connection) as servers:
            await Conversation(partial(ask_server, servers, settings.connection.deadline_s)).run()
    else:
        from specdec.inference.cli.chat.url import url_speaker

        async with url_speaker(settings.url, settings.model, settings.connection) as speaker:
            await Conversation(speaker).run()
    return 0
