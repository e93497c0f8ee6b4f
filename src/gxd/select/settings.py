"""Settings that may differ between groups, and may be changed while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from gxd.arguments import near
from gxd.plan.units import Group, UnitPlan


class PerGroup:
    """A setting of all groups, and of single ones.

    Attributes:
        default: the common value.
        own: group name -> the value of a group that has its own.
        planned: the value that the plan gives a group, or None.
    """

    def __init__(
        self,
        name: str,
        default: Any,
        check: Callable[[Any], Any],
        planned: Callable[[Group], Any] | None = None,
    ) -> None:
        self.name, self.check, self.planned = name, check, planned
        self.own: dict[str, Any] = {}
        self._default = check(default)
        self._last: tuple[UnitPlan, tuple[Any, ...]] | None = None

    @property
    def default(self) -> Any:
        return self._default

    @default.setter
    def default(self, value: Any) -> None:
        self._default, self._last = self.check(value), None

    def values(self, plan: UnitPlan) -> tuple[Any, ...]:
        """Of the groups of a plan, in their order."""
        if self._last is None or self._last[0] is not plan:
            self._last = (plan, tuple([self.of(group) for group in plan.groups]))
        return self._last[1]

    def of(self, group: Group) -> Any:
        """Its own value, or that of the plan, or the common one."""
        planned = None if self.planned is None else self.planned(group)
        return self.own.get(group.name, self._default if planned is None else planned)

    def change(self, group: str, *value: Any) -> None:
        """Give a group a value of its own; without one, take it away."""
        self.own.pop(group, None) if not value else self.own.update({group: self.check(value[0])})
        self._last = None


class OfPlan(MutableMapping[str, Any]):
    """Group name -> the value in force, of a setting and the groups of a plan. Setting one takes effect at the next
    step; deleting it gives the group the value of the plan, or the common one, again.
    """

    def __init__(self, setting: PerGroup, plan: UnitPlan) -> None:
        self.setting, self.plan = setting, plan

    def __getitem__(self, group: str) -> Any:
        return self.setting.of(self.plan[self._known(group)])

    def __setitem__(self, group: str, value: Any) -> None:
        self.setting.change(self._known(group), value)

    def __delitem__(self, group: str) -> None:
        self.setting.change(self._known(group))

    def __iter__(self) -> Iterator[str]:
        return iter([group.name for group in self.plan.groups])

    def __len__(self) -> int:
        return len(self.plan.groups)

    def __repr__(self) -> str:
        return repr(dict(self))

    def _known(self, group: str) -> str:
        if group not in list(self):
            hint = near(group, self) or "."
            raise KeyError(f"{self.setting.name}: no group {group!r} in the plan{hint} It has {', '.join(self)}")
        return group
