"""Settings that may differ between groups, and may be changed while training goes on."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any


class PerGroup(MutableMapping[str, Any]):
    """Group name -> the value in force. Setting one takes effect at the next step; deleting it gives the group the
    common value again.

    Attributes:
        default: the common value.
        own: the values of groups that have their own.
        names: of all groups.
    """

    def __init__(self, name: str, default: Any, check: Callable[[Any], Any]) -> None:
        self.name, self.check = name, check
        self.own: dict[str, Any] = {}
        self.names: tuple[str, ...] = ()
        self._default = check(default)
        self._values: tuple[Any, ...] | None = None

    @property
    def default(self) -> Any:
        return self._default

    @default.setter
    def default(self, value: Any) -> None:
        self._default, self._values = self.check(value), None

    @property
    def values(self) -> tuple[Any, ...]:  # type: ignore[override]
        """In the order of the groups."""
        if self._values is None or len(self._values) != len(self.names):
            self._values = tuple(self.own.get(name, self._default) for name in self.names)
        return self._values

    def __getitem__(self, group: str) -> Any:
        return self.own.get(self._known(group), self._default)

    def __setitem__(self, group: str, value: Any) -> None:
        self.own[self._known(group)], self._values = self.check(value), None

    def __delitem__(self, group: str) -> None:
        self.own.pop(self._known(group), None)
        self._values = None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return repr(dict(self))

    def _known(self, group: str) -> str:
        if group not in self.names:
            near = difflib.get_close_matches(str(group), self.names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise KeyError(f"{self.name}: no group {group!r} in the plan.{hint} It has {', '.join(self.names)}")
        return group
