"""The methods of the module that are served, each with inputs, outputs and buckets of its own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from app.buckets import Bucket, Coverage, Dimension, Kind
from app.servable import TensorSpec


class Company(StrEnum):
    """Which other requests one may run together with, as the model bears it without another answer."""

    ANY = "any"  # shorter ones are padded
    SAME_LENGTHS = "same lengths"  # all sizes but the batch are equal
    NONE = "none"


@dataclass(frozen=True, slots=True)
class ModelPath:
    """One way through the model: the method `name`, what it takes and returns in order, and what is warmed for it.

    `dimensions`: the symbolic ones of its inputs. `company`: found out when answers are proven; `company_why`: what
    speaks against more of it.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dimensions: tuple[Dimension, ...]
    buckets: tuple[Bucket, ...]
    company: Company = Company.ANY
    company_why: str = ""

    @property
    def paddable(self) -> bool:
        """Every input that has a symbolic dimension says what to pad it with."""
        return all(spec.pad is not None or not spec.symbolic for spec in self.inputs)

    def coverage(self, dynamic: bool, uncovered: str) -> Coverage:
        """Return which shapes are promised; where there is no value to pad with, `pad` becomes `reject`."""
        policy = "reject" if not dynamic and uncovered == "pad" and not self.paddable else uncovered
        return Coverage(self.dimensions, self.buckets, dynamic, policy, self.name)

    def keeping(self, wanted: Callable[[Bucket], bool]) -> "ModelPath":
        """Return the same path with only some of its buckets."""
        return replace(self, buckets=tuple(bucket for bucket in self.buckets if wanted(bucket)))


def coverage_rows(coverages: Iterable[Coverage], engine: str) -> list[dict[str, str]]:
    """Say of every shape of every path how it is served, by which bucket, and by which engine's code."""
    return [
        {**row, "engine": _engine(row["served"], coverage.policy, engine)}
        for coverage in coverages
        for row in coverage.rows()
    ]


def _engine(served: str, policy: str, engine: str) -> str:
    if served == "rejected":
        return "none"
    return "eager" if served == Kind.UNCOVERED and policy == "eager" else engine
