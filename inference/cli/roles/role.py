"""What a role is: a value of --role, its settings, and what it runs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from inference.config import ObserveConfig


class Settings(Protocol):
    """Settings of any role: a frozen dataclass of groups, of which each role has this one."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def observe(self) -> ObserveConfig: ...


SettingsT = TypeVar("SettingsT", bound=Settings)


@dataclass(frozen=True, slots=True)
class Role(Generic[SettingsT]):
    """One value of --role.

    Attributes:
        settings: the dataclass that its flags are made of; imports nothing that is slow.
        run: from settings to an exit code; imports what it needs.
    """

    name: str
    summary: str
    settings: type[SettingsT]
    run: Callable[[SettingsT], Coroutine[Any, Any, int]]
