"""Functions that read the events of an answer, and return its commits (groups of final tokens) or its token ids."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable

from specdec.inference.commit import Commit, Opened, TokenEvent
from specdec.inference.engine.target_session import TargetSession


async def opened_and_commits(events: AsyncIterable[TokenEvent]) -> tuple[Opened, list[Commit]]:
    """Read an answer to its end; return its first event, the only Opened, and its commits (groups of final tokens)."""
    opened, *rest = [event async for event in events]
    assert isinstance(opened, Opened)
    commits = [event for event in rest if isinstance(event, Commit)]
    assert len(commits) == len(rest)
    return opened, commits


async def commits_of(events: AsyncIterable[TokenEvent]) -> list[Commit]:
    """Read an answer to its end; return its commits (groups of final tokens), without the Opened event before them."""
    return (await opened_and_commits(events))[1]


async def tokens_of(events: AsyncIterable[TokenEvent]) -> list[int]:
    """Read an answer to its end; return the token ids of all its commits in one list."""
    return tokens(await commits_of(events))


def tokens(commits: Iterable[Commit]) -> list[int]:
    return [token_id for commit in commits for token_id in commit.token_ids]


async def each_commit(events: AsyncIterable[TokenEvent]) -> AsyncIterator[Commit]:
    """Yield the commits (groups of final tokens) of an answer as they arrive; skip other events."""
    async for event in events:
        if isinstance(event, Commit):
            yield event


async def next_commit(session: TargetSession) -> Commit:
    """Wait for a session's next commit (a group of final tokens), skip other events, and return it."""
    event = await session.commits.get()
    return event if isinstance(event, Commit) else await next_commit(session)
