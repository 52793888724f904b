"""Which waiting requests run together, and their tensors joined and split again: arithmetic, no threads, no clock."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from app.buckets import Coverage, Kind, Refusal, Route
from app.paths import Company, ModelPath
from app.servable import Array, TensorSpec

# Lengths are mixed in one run as long as no more than this share of what is computed is padding.
MOST_PADDING = 0.15
# Code that only knows its buckets runs a bucket for requests that fill at least this share of its batch.
LEAST_FILLED = 0.5


class Batched(Protocol):
    """What is seen of a request here: the size of every symbolic dimension, and how it would run alone."""

    sizes: Mapping[str, int]
    route: Route


B = TypeVar("B", bound=Batched)


@dataclass(frozen=True, slots=True)
class Batching:
    """How requests of one path are put together.

    `dimension`: the one that all inputs and outputs begin with and none has elsewhere; None: each request runs alone.
    """

    path: ModelPath
    coverage: Coverage
    dimension: str | None

    @classmethod
    def of(cls, path: ModelPath, coverage: Coverage) -> "Batching":
        """Find the dimension along which requests can be joined."""
        specs = (*path.inputs, *path.outputs)
        first = {spec.shape[0] if spec.shape else None for spec in specs}
        name = first.pop() if len(first) == 1 else None
        elsewhere = any(name in spec.shape[1:] for spec in specs)
        joins = isinstance(name, str) and not elsewhere and path.company is not Company.NONE
        return cls(path, coverage, str(name) if joins else None)

    @property
    def most(self) -> int:
        """The largest batch that runs."""
        promised = [dict(bucket.sizes)[self.dimension] for bucket in self.coverage.buckets if self.dimension]
        return max(promised, default=1)

    def choose(self, waiting: Sequence[B]) -> tuple[list[B], Route]:
        """Return which of the waiting run together and how; the first, which has waited longest, is always among them.

        Others join as long as little of the run is padding: first those of the same lengths, then those of the
        lengths nearest to them.
        """
        leader = waiting[0]
        if self.dimension is None or leader.route.kind is Kind.UNCOVERED or len(waiting) == 1:
            return [leader], leader.route
        chosen = _Chosen(self, self.dimension, leader)
        for one in self._in_order(leader, waiting):
            if chosen.rows >= self.most:
                break
            chosen.try_to_add(one)
        return chosen.best()

    def _in_order(self, leader: B, waiting: Sequence[B]) -> Sequence[B]:
        others = [one for one in waiting[1:] if one.route.kind is not Kind.UNCOVERED]
        own = _lengths(leader.sizes, self.dimension)
        alike = [one for one in others if _lengths(one.sizes, self.dimension) == own]
        if not self.path.paddable or self.path.company is not Company.ANY:
            return alike
        places = volume(own)
        rest = [one for one in others if _lengths(one.sizes, self.dimension) != own]
        return alike + sorted(rest, key=lambda one: abs(volume(_lengths(one.sizes, self.dimension)) - places))

    def route(self, sizes: Mapping[str, int]) -> Route | None:
        """Return how a batch of these sizes runs, or None where no bucket holds it."""
        found = self.coverage.route(sizes)
        return None if isinstance(found, Refusal) or found.kind is Kind.UNCOVERED else found

    def join(self, batch: Sequence[tuple[Mapping[str, Array], Mapping[str, int]]], route: Route) -> dict[str, Array]:
        """Return the tensors of one run at the route's sizes: requests one after another, the rest padding."""
        sizes = dict(route.sizes)
        return {spec.name: _join(spec, [arrays[spec.name] for arrays, _ in batch], sizes) for spec in self.path.inputs}

    def split(self, outputs: Mapping[str, Array], asked: Sequence[Mapping[str, int]]) -> list[dict[str, Array]]:
        """Return each request's own part of the outputs, cut back to its sizes."""
        found, row = [], 0
        for sizes in asked:
            end = row + sizes[str(self.dimension)]
            found.append({spec.name: outputs[spec.name][_part(spec, row, end, sizes)] for spec in self.path.outputs})
            row = end
        return found


class _Chosen:
    """A batch that grows by one request at a time; remembers the largest one that is worth running."""

    def __init__(self, batching: Batching, dimension: str, leader: Any) -> None:
        self._batching, self._dimension = batching, dimension
        self._batch: list[Any] = [leader]
        self._sizes: dict[str, int] = dict(leader.sizes)
        self._asked = volume(leader.sizes)
        self._best = (1, leader.route)
        # A leader whose lengths are padded even when it runs alone must not be without company for it.
        self._allowed = max(MOST_PADDING, 1 - self._asked / self._computed(leader.sizes, leader.route))

    @property
    def rows(self) -> int:
        """The batch as it stands."""
        return self._sizes[self._dimension]

    def try_to_add(self, one: Any) -> None:
        """Take a request into the batch where the padding that its lengths bring allows it."""
        sizes = {name: max(size, one.sizes[name]) for name, size in self._sizes.items()}
        sizes[self._dimension] = self.rows + one.sizes[self._dimension]
        asked = self._asked + volume(one.sizes)
        route = self._batching.route(sizes) if sizes[self._dimension] <= self._batching.most else None
        if route is None or 1 - asked / self._computed(sizes, route) > self._allowed:
            return
        self._batch.append(one)
        self._sizes, self._asked = sizes, asked
        if self.rows >= LEAST_FILLED * dict(route.sizes)[self._dimension]:
            self._best = (len(self._batch), route)

    def _computed(self, sizes: Mapping[str, int], route: Route) -> int:
        """Return the cells of the rows that are asked for; rows that a fixed bucket adds are another matter."""
        return volume({**dict(route.sizes), self._dimension: sizes[self._dimension]})

    def best(self) -> tuple[list[Any], Route]:
        """Return the requests to run, and how."""
        count, route = self._best
        return self._batch[:count], route


def _lengths(sizes: Mapping[str, int], dimension: str | None) -> tuple[int, ...]:
    return tuple(size for name, size in sizes.items() if name != dimension)


def volume(sizes: Mapping[str, int] | Sequence[int]) -> int:
    """Return the product of sizes: the places that a tensor of these sizes has, up to a constant."""
    found: int = math.prod(sizes.values() if isinstance(sizes, Mapping) else sizes)
    return found


def _join(spec: TensorSpec, arrays: Sequence[Array], sizes: Mapping[str, int]) -> Array:
    shape = spec.sized(sizes)
    rows = sum(len(array) for array in arrays)
    if rows == shape[0] and all(array.shape[1:] == shape[1:] for array in arrays):
        return np.concatenate(arrays)
    joined: Array = np.full(shape, spec.pad or 0, dtype=spec.dtype)
    row = 0
    for array in arrays:
        joined[(slice(row, row + len(array)), *(slice(size) for size in array.shape[1:]))] = array
        row += len(array)
    return joined


def _part(spec: TensorSpec, row: int, end: int, sizes: Mapping[str, int]) -> tuple[slice, ...]:
    rest = (slice(sizes[size]) if isinstance(size, str) else slice(None) for size in spec.shape[1:])
    return (slice(row, end), *rest)
