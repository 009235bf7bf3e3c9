"""Tools (functions that a model can call) for tests of chats and of the Responses API, and an agent that calls one."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}


class Forecast(BaseModel):
    """Weather forecast for some days."""

    days: int = Field(ge=1, le=9)
    rain: bool


def tool(name: str = "f", parameters: dict[str, Any] | None = PARAMETERS, **others: Any) -> dict[str, Any]:
    """Return a tool with this name and JSON schema of arguments, in the format of Chat Completions."""
    return {"type": "function", "function": {"name": name, "parameters": parameters, **others}}


def response_tool(name: str = "f", parameters: dict[str, Any] | None = PARAMETERS, **others: Any) -> dict[str, Any]:
    """Return a tool with this name and JSON schema of arguments, in the format of the Responses API."""
    return {"type": "function", **tool(name, parameters, **others)["function"]}


async def agent_runs(model: Any, **fields: Any) -> tuple[Any, Any, list[str]]:
    """Run an agent of OpenAI's Agents SDK that must call a tool, once whole and once streamed.

    `fields` are further arguments of its Agent. Return the whole run's result, the streamed one's, and the names of the
    stream's run items. In each run the tool must be called once.
    """
    from agents import Agent, ModelSettings, RunConfig, Runner, function_tool

    called: list[int] = []

    @function_tool
    def forecast(days: int) -> str:
        """Return the weather of a place."""
        called.append(days)
        return "rain"

    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=60, temperature=0.0)
    agent: Any = Agent(name="a", instructions="Help.", model=model, model_settings=settings, tools=[forecast], **fields)
    asked: Any = {"starting_agent": agent, "input": "Rain?", "run_config": RunConfig(tracing_disabled=True)}
    result = await Runner.run(**asked)
    assert len(called) == 1
    streaming = Runner.run_streamed(**asked)
    kinds: list[str] = [
        event.name async for event in streaming.stream_events() if event.type == "run_item_stream_event"
    ]
    assert called == [called[0]] * 2
    return result, streaming, kinds
