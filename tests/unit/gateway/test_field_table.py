"""docs/foreign_fields.md lists every field that vLLM and llama-server take, and says what the gateway does."""

from __future__ import annotations

import json
import re
from typing import Any

from scripts.field_table import BEGIN, DOCUMENT, END, LLAMA, VLLM, updated
from tests.support.completers import ScriptedCompleter
from tests.unit.gateway.test_app import PASSES, client_of

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "x"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
}


def rows() -> dict[str, dict[str, str]]:
    """What the document says of each field, by endpoint."""
    text = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    found = re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    return {name: {"completions": completions.strip(), "chat": chat.strip()} for name, completions, chat in found}


def test_the_table_is_up_to_date() -> None:
    document = DOCUMENT.read_text()
    assert document == updated(document), "run `python -m scripts.field_table`"


def test_every_field_of_both_servers_is_in_it() -> None:
    for endpoint in BODIES:
        assert {name for name, row in rows().items() if row[endpoint]} == {*VLLM[endpoint], *LLAMA[endpoint]}


async def test_the_server_does_what_the_table_says() -> None:
    """Asked over HTTP: what is refused is refused by name, and every no-op value is taken."""
    async with client_of(ScriptedCompleter(PASSES)) as client:
        for endpoint, (path, body) in BODIES.items():
            for name, row in rows().items():
                if row[endpoint] == "refused":
                    error = (await client.post(path, json={**body, name: 1})).json()["error"]
                    assert (error["param"], error["code"]) == (name, "unsupported_parameter"), name
                for value in re.findall(r"`([^`]*)`", row[endpoint]):
                    answer = await client.post(path, json={**body, name: json.loads(value)})
                    assert answer.is_success, (name, value, answer.text)
