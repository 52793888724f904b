"""Dimensions, buckets, and which of them answers for a shape (pure arithmetic, no tensors)."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

Sizes = Mapping[str, int]
# The path that a model has without being told: its `forward`. Buckets of other paths carry their path's name.
FORWARD = "forward"
SIZE = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<size>[1-9]\d{0,17})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Dimension:
    """A symbolic dimension: its promised range and the sizes that are warmed."""

    name: str
    min: int
    max: int
    buckets: tuple[int, ...]

    @property
    def fixed(self) -> bool:
        """Only one size is possible."""
        return self.min == self.max


@dataclass(frozen=True, slots=True)
class Bucket:
    """One warmed combination of sizes, in the order of the configured dimensions, of one path through the model."""

    sizes: tuple[tuple[str, int], ...]
    required: bool = True
    path: str = FORWARD

    @property
    def name(self) -> str:
        """The public name, as in metrics and reports: `batch=1,sequence=32`, of another path `encode:batch=1`."""
        return on_path(self.path, ",".join(f"{name}={size}" for name, size in self.sizes) or "fixed")

    @property
    def volume(self) -> int:
        """Product of the sizes: the cost order of buckets."""
        return math.prod(size for _, size in self.sizes)

    @classmethod
    def named(cls, name: str) -> "Bucket":
        """Return the bucket of a public name; raises ValueError where the text is none."""
        path, colon, own = name.rpartition(":")
        path = path if colon else FORWARD
        if own == "fixed":
            return cls((), path=path)
        found = [SIZE.fullmatch(part) for part in own.split(",")]
        sizes = tuple((one["name"], int(one["size"])) for one in found if one)
        if len({dimension for dimension, _ in sizes}) < len(found):
            raise ValueError(f"{name!r} is no name of a bucket, like batch=1,sequence=32")
        return cls(sizes, path=path)

    def holds(self, sizes: Sizes) -> bool:
        """Every size fits into this bucket."""
        return all(sizes[name] <= limit for name, limit in self.sizes)


def on_path(path: str, text: str) -> str:
    """Return what is said of shapes with the path that it is said of, where that is not `forward`."""
    return text if path == FORWARD else f"{path}:{text}"


def cross(dimensions: Sequence[Dimension], path: str = FORWARD) -> tuple[Bucket, ...]:
    """Return every combination of bucket sizes, smallest first."""
    combinations = itertools.product(*([(d.name, size) for size in d.buckets] for d in dimensions))
    return tuple(sorted((Bucket(sizes, path=path) for sizes in combinations), key=lambda bucket: bucket.volume))


class Kind(StrEnum):
    """How a shape is served."""

    EXACT = "exact"  # a bucket of just this shape
    DYNAMIC = "dynamic"  # between buckets, by code that holds for the whole range
    PADDED = "padded"  # padded up to the bucket and sliced back
    UNCOVERED = "uncovered"  # run as it is, by dynamic code or the module itself; never warmed, and counted


@dataclass(frozen=True, slots=True)
class Route:
    """The answer for one shape: how it is served, by which bucket, at which sizes it runs, which share is padding."""

    kind: Kind
    bucket: Bucket | None
    sizes: tuple[tuple[str, int], ...]
    padding: float = 0.0
    path: str = FORWARD

    @classmethod
    def exactly(cls, bucket: Bucket) -> "Route":
        """Return the route of a shape that is a bucket."""
        return cls(Kind.EXACT, bucket, bucket.sizes, path=bucket.path)


@dataclass(frozen=True, slots=True)
class Refusal:
    """No covered way to serve a shape; `why` names the nearest covered ones.

    `impossible`: outside the declared range whatever the policy, so not a matter of coverage.
    """

    why: str
    impossible: bool


@dataclass(frozen=True)
class Coverage:
    """Which shapes of one path are promised.

    A shape is covered when it fits into a warmed bucket: run as it is by an engine whose code holds for the whole
    range (`dynamic`), padded to the bucket by one that only knows its buckets (policy `pad`). Everything else inside
    the declared range is uncovered and falls under `policy`: `eager` runs it by the module itself.
    """

    dimensions: tuple[Dimension, ...]
    buckets: tuple[Bucket, ...]
    dynamic: bool
    policy: str
    path: str = FORWARD

    @cached_property
    def _by_sizes(self) -> dict[tuple[tuple[str, int], ...], Bucket]:
        return {bucket.sizes: bucket for bucket in self.buckets}

    def route(self, sizes: Sizes) -> Route | Refusal:
        """Return how these sizes are served, or why they are not."""
        if outside := self._outside(sizes):
            return Refusal(outside, impossible=True)
        exact = tuple((dimension.name, sizes[dimension.name]) for dimension in self.dimensions)
        if bucket := self._by_sizes.get(exact):
            return Route.exactly(bucket)
        bucket = min((b for b in self.buckets if b.holds(sizes)), key=lambda b: b.volume, default=None)
        if bucket and self.dynamic:
            return Route(Kind.DYNAMIC, bucket, exact, path=self.path)
        if bucket and self.policy == "pad":
            padding = 1.0 - math.prod(size for _, size in exact) / bucket.volume
            return Route(Kind.PADDED, bucket, bucket.sizes, padding, self.path)
        if self.policy == "eager" or (self.dynamic and self.policy == "pad"):
            return Route(Kind.UNCOVERED, None, exact, path=self.path)
        return Refusal(self._uncovered(sizes), impossible=False)

    def _outside(self, sizes: Sizes) -> str:
        wrong = [
            f"{d.name} is {sizes[d.name]}, allowed are {d.min} to {d.max}"
            for d in self.dimensions
            if not d.min <= sizes[d.name] <= d.max
        ]
        return "; ".join(wrong)

    def _uncovered(self, sizes: Sizes) -> str:
        asked = on_path(self.path, _text({d.name: sizes[d.name] for d in self.dimensions}))
        return f"shape {asked} is not covered; nearest covered: {self._nearest(sizes)}"

    def _nearest(self, sizes: Sizes) -> str:
        def distance(bucket: Bucket) -> float:
            return sum(abs(size - sizes[name]) / max(size, sizes[name], 1) for name, size in bucket.sizes)

        return " or ".join(bucket.name for bucket in sorted(self.buckets, key=distance)[:2]) or "none"

    def rows(self) -> list[dict[str, str]]:
        """Say for every bucket, the space between and the space beyond, how a shape there is served."""
        rows = [{"shapes": b.name, "served": str(Kind.EXACT), "by": b.name} for b in self.buckets]
        alone = {"pad": Kind.PADDED, "eager": Kind.UNCOVERED}.get(self.policy, "rejected")
        between = Kind.DYNAMIC if self.dynamic else alone
        outermost = [b for b in self.buckets if not any(o != b and o.holds(dict(b.sizes)) for o in self.buckets)]
        rows += [
            {"shapes": f"within {b.name}", "served": str(between), "by": self._between(between)} for b in outermost
        ]
        limits = {d.name: d.max for d in self.dimensions}
        if not any(b.holds(limits) for b in outermost):
            served = self.policy == "eager" or (self.dynamic and self.policy == "pad")
            beyond = Kind.UNCOVERED if served else "rejected"
            within = on_path(self.path, _text(limits))
            rows.append({"shapes": f"beyond, within {within}", "served": str(beyond), "by": f"policy {self.policy}"})
        return rows

    def _between(self, served: str) -> str:
        return "the smallest that holds it" if served in {Kind.DYNAMIC, Kind.PADDED} else f"policy {self.policy}"


def _text(sizes: Sizes) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())
