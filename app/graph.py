"""The start-up graph: stages are functions, edges come from their signatures, all is proven before anything runs."""

import graphlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from app.errors import SettingsError
from app.progress import Progress

T = TypeVar("T")


class Lane(StrEnum):
    """Where a stage runs."""

    DISK = "disk"  # threads that read files
    DEVICE = "device"  # the one thread that may touch the device
    PROCESS = "process"  # a thread that waits for a child process


@dataclass(frozen=True, slots=True)
class Skipped(Generic[T]):
    """What a stage returns that had nothing to do: the value its dependants need, and why there was nothing to do."""

    value: T
    why: str


@dataclass(frozen=True, slots=True)
class Stage:
    """A named function with the types it needs and the type it gives."""

    name: str
    run: Callable[..., Any]
    needs: tuple[Any, ...]
    gives: Any
    lane: Lane


def stage(lane: Lane) -> Callable[[Callable[..., Any]], Stage]:
    """Make a stage of a function: parameters are its needs, the return annotation is its promise."""

    def make(run: Callable[..., Any]) -> Stage:
        hints = typing.get_type_hints(run)
        gives = _promise(hints.pop("return"))
        return Stage(run.__name__.replace("_", "-"), run, tuple(hints.values()), gives, lane)

    return make


def _promise(annotation: Any) -> Any:
    """Drop `Skipped[…]` from a union: being skipped is an outcome of the stage, not of its value."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return annotation
    kept = [part for part in typing.get_args(annotation) if typing.get_origin(part) is not Skipped]
    promise = kept[0]
    for part in kept[1:]:
        promise |= part
    return promise


class Graph:
    """An immutable, proven set of stages: every need has one giver, nothing goes in a circle."""

    def __init__(self, stages: Iterable[Stage], given: Iterable[Any] = ()) -> None:
        self.given = frozenset(given)
        by_type: dict[Any, Stage] = {}
        for one in stages:
            if one.gives in by_type or one.gives in self.given:
                raise SettingsError(f"{one.name} and another stage both give {one.gives}; a value has one giver")
            by_type[one.gives] = one
        self.givers: Mapping[Any, Stage] = by_type
        for one in by_type.values():
            for need in one.needs:
                if need not in by_type and need not in self.given and need is not Progress:
                    raise SettingsError(f"{one.name} needs {need}, which no stage gives")
        try:
            sorter = graphlib.TopologicalSorter({s.name: self.before(s) for s in by_type.values()})
            order = tuple(sorter.static_order())  # a generator: the circle is found while it runs
        except graphlib.CycleError as error:
            raise SettingsError(f"the stages go in a circle: {' → '.join(error.args[1])}") from error
        names = {s.name: s for s in by_type.values()}
        self.stages: tuple[Stage, ...] = tuple(names[name] for name in order)

    def before(self, one: Stage) -> tuple[str, ...]:
        """Return the names of the stages that must end before this one starts."""
        return tuple(self.givers[need].name for need in one.needs if need in self.givers)

    def until(self, *promises: Any) -> "Graph":
        """Return the part of the graph that is needed for these values."""
        wanted: dict[str, Stage] = {}
        open_needs = list(promises)
        while open_needs:
            giver = self.givers.get(open_needs.pop())
            if giver and giver.name not in wanted:
                wanted[giver.name] = giver
                open_needs += giver.needs
        return Graph((s for s in self.stages if s.name in wanted), self.given)
