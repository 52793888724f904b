"""Turn a start report into the times of a start that can be planned with."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from app import report_file
from app.errors import SettingsError
from app.plan import PROVE, WARM, BucketTimes, StageTimes, Start
from app.plan_values import Seconds, ShownName, refuse, validated

# A stage ends before the next one begins, but both moments are rounded where a report was written by hand.
CLOCK_S = 0.001
# For a hit: what took time in it need not take time again.
ONCE: Mapping[str, str] = {
    "build-artifact": "waited for the build of another process",
    "compute-reference": "had no recorded answers for its weights and computed them",
}


class _Model(BaseModel):
    name: ShownName


class _Stage(BaseModel):
    name: ShownName
    needs: list[str]
    state: str
    start_s: Seconds
    end_s: Seconds

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class _Bucket(BaseModel):
    name: ShownName
    state: str
    first_s: Seconds | None
    second_s: Seconds | None
    steady_s: Seconds | None

    @model_validator(mode="after")
    def _timed(self) -> Self:
        if self.state == "warm" and None in (self.first_s, self.second_s, self.steady_s):
            raise ValueError("a bucket that is warm has first_s, second_s and steady_s")
        return self

    @property
    def times(self) -> tuple[float, float, float]:
        """The first, the second and a steady run of a warm bucket."""
        return self.first_s or 0.0, self.second_s or 0.0, self.steady_s or 0.0


class _Report(BaseModel):
    """The part of a start report that is planned with."""

    model: _Model
    time_to_ready_s: Seconds
    file_cache: str
    compile_cache: Literal["cold", "warm", "none"]
    stages: Annotated[list[_Stage], Field(min_length=1)]
    buckets: Annotated[list[_Bucket], Field(max_length=500)]


@dataclass(frozen=True, slots=True)
class Measured:
    """A start as a report measured it, with what must be said about that."""

    file: Path
    model: str
    start: Start
    notes: tuple[str, ...]


def measure(file: Path) -> Measured:
    """Return what a start report measured; raises SettingsError with every reason why it cannot be planned with."""
    document = report_file.document(file)
    if document.get("time_to_ready_s") is None:
        raise SettingsError(f"{file} is of a start that did not become ready; give the report of one that did")
    found = validated(_Report, document, f"{file}: the start report")
    refuse(f"{file}: the start report", list(_inconsistencies(found)))
    cache = "hit" if found.compile_cache == "warm" else "miss"
    buckets, further = _bucket_times(found)
    tail_s = max(0.0, found.time_to_ready_s - max(stage.end_s for stage in found.stages))
    start = Start(cache, tuple(_stages(found.stages)), buckets, tail_s)
    notes = (
        f"measured in {file} (file cache {found.file_cache or 'unknown'})",
        f"{2 + further} runs of each bucket, from the duration of {WARM}; a first request that is not covered takes as "
        f"long as the first of them, which for {buckets[0].name} holds what a process does only once",
        *_doubts(found),
    )
    return Measured(file, found.model.name, start, tuple(f"{cache}: {note}" for note in notes))


def _inconsistencies(found: _Report) -> Iterator[str]:
    """Say why these are no times that a start of Warmgate can have."""
    for what, entries in (("stage", found.stages), ("bucket", found.buckets)):
        names = [one.name for one in entries]
        yield from (f"{what} {name} stands twice" for name in sorted({n for n in names if names.count(n) > 1}))
    ends: dict[str, float] = {}
    for one in found.stages:
        if unknown := sorted(set(one.needs) - ends.keys()):
            yield f"stage {one.name} needs {', '.join(unknown)}, which does not stand before it"
        elif one.start_s < max((ends[name] for name in one.needs), default=0.0) - CLOCK_S:
            yield f"stage {one.name} begins at {one.start_s} s, before what it needs has ended"
        if one.duration_s < 0:
            yield f"stage {one.name} ends at {one.end_s} s, before it begins at {one.start_s} s"
        ends[one.name] = one.end_s
    if WARM not in ends:
        yield f"there is no stage {WARM}"
    if found.time_to_ready_s < max(ends.values()) - CLOCK_S:
        yield f"time_to_ready_s = {found.time_to_ready_s}: before the last stage has ended"
    if not any(one.state == "warm" for one in found.buckets):
        yield "no bucket is warm, so nothing is known of any"


def _stages(stages: Sequence[_Stage]) -> Iterator[StageTimes]:
    ends: dict[str, float] = {}
    for one in stages:
        needed = max((ends[name] for name in one.needs), default=0.0)
        yield StageTimes(one.name, tuple(one.needs), one.duration_s, max(0.0, one.start_s - needed))
        ends[one.name] = one.end_s


def _bucket_times(found: _Report) -> tuple[tuple[BucketTimes, ...], int]:
    """Split the stages that run buckets among those that are warm, by the runs of each.

    Also returns how many runs each had after its second.
    """
    durations = {one.name: one.duration_s for one in found.stages}
    warm = {one.name: one.times for one in found.buckets if one.state == "warm"}
    steady = [one for _, _, one in warm.values()]
    further = _further_runs(durations[WARM] - math.fsum(a + b for a, b, _ in warm.values()), math.fsum(steady))
    warm_s = _split(durations[WARM], [a + b + further * c for a, b, c in warm.values()])
    proof_s = _split(durations.get(PROVE, 0.0), steady)
    times = (
        BucketTimes(name, runs_s, once_warm, max(0.0, first - once_warm), one_proof_s)
        for (name, (first, _, once_warm)), runs_s, one_proof_s in zip(warm.items(), warm_s, proof_s, strict=True)
    )
    return tuple(times), further


def _further_runs(left_s: float, steady_s: float) -> int:
    """Return how many runs a bucket had after its second; a report does not say it."""
    return round(min(max(0.0, left_s / steady_s), 1e6)) if steady_s else 0


def _split(total: float, weights: Sequence[float]) -> list[float]:
    whole = math.fsum(weights)
    return [total * (weight / whole) if whole else total / len(weights) for weight in weights]


def _doubts(found: _Report) -> Iterator[str]:
    """Say what is not planned with, and what makes the next start of this kind another one."""
    if others := [f"{one.name} ({one.state})" for one in found.buckets if one.state != "warm"]:
        yield f"not warm in the report, and left out: {', '.join(others)}"
    if found.compile_cache == "none":
        yield "compile_cache is none: the module itself was served, as no code was restored"
    for one in found.stages:
        if found.compile_cache == "warm" and one.name in ONCE and one.state == "done":
            yield (
                f"this start {ONCE[one.name]} ({one.name}, {one.duration_s:.2f} s); the next need not, and may be "
                f"ready earlier"
            )
