"""Read what is to be planned: given times, or times measured by start reports, and the requests that were observed."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from app import plan
from app.buckets import FORWARD, Bucket
from app.errors import SettingsError
from app.plan import BucketTimes, Plan, Start
from app.plan_report import Measured, measure
from app.plan_values import Count, Seconds, ShownName, refuse, validated
from app.settings import Section
from app.validation import parse_yaml, read_text

CACHES = {"miss": "cold", "hit": "warm"}


class _GivenBucket(Section):
    name: ShownName
    warm_s: Seconds
    steady_s: Seconds
    uncovered_extra_s: Seconds
    share: Seconds = 1


class _MeasuredBucket(Section):
    """A bucket of reports; a time that is given counts instead of the measured one."""

    name: ShownName
    warm_s: Seconds | None = None
    steady_s: Seconds | None = None
    uncovered_extra_s: Seconds | None = None
    share: Seconds = 1


Buckets = TypeVar("Buckets", list[_GivenBucket], list[_MeasuredBucket])
Listed = Sequence[_GivenBucket] | Sequence[_MeasuredBucket]


def _distinct(buckets: Buckets) -> Buckets:
    names = [bucket.name for bucket in buckets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"each name once, given twice: {', '.join(twice)}")
    return buckets


class _Request(BaseModel):
    """How often a shape was asked for: `{batch: 3, sequence: 77, count: 120}`, of another path with its name."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Count]

    path: ShownName = FORWARD
    count: Count

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every dimension."""
        return self.__pydantic_extra__


class _Requests(Section):
    """Part of both kinds of plans."""

    requests: Annotated[list[_Request], Field(min_length=1)] | None = None


class _GivenPlan(_Requests):
    weights_s: Seconds
    restore_s: Seconds
    build_s: Seconds
    overlap: bool = False
    buckets: Annotated[list[_GivenBucket], Field(min_length=1, max_length=500)]
    _names = field_validator("buckets")(_distinct)


class _MeasuredPlan(_Requests):
    reports: Annotated[list[Path], Field(min_length=1, max_length=2)]
    buckets: Annotated[list[_MeasuredBucket], Field(min_length=1, max_length=500)] | None = None
    _names = field_validator("buckets")(_distinct)


def read(files: Sequence[Path]) -> Plan:
    """Return the plan of one plan file, or of start reports; raises SettingsError with every problem of a file."""
    documents = [_parse(file) for file in files]
    if all("stages" in document for document in documents):
        return _of_reports(files[0], validated(_MeasuredPlan, {"reports": files}, "the plan"), Path())
    if len(files) > 1:
        raise SettingsError(f"{len(files)} files, not all of them start reports; give one plan file, or reports alone")
    return _of_document(files[0], documents[0])


def _parse(file: Path) -> dict[str, Any]:
    found = _value(file)
    if not isinstance(found, dict):
        raise SettingsError(f"{file} holds {type(found).__name__}, expected a plan (weights_s …) or a start report")
    return found


def _value(file: Path) -> Any:
    """Return what a file of JSON or YAML holds; YAML takes 1e-05 for text, so JSON comes first."""
    text = read_text(file, "give a plan file or a start report")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return parse_yaml(file, text)


def _of_document(file: Path, document: dict[str, Any]) -> Plan:
    if isinstance(rows := document.get("requests"), str):
        document = {**document, "requests": _value(file.parent / rows)}
    if "reports" in document:
        return _of_reports(file, validated(_MeasuredPlan, document, f"{file}: the plan"), file.parent)
    return _of_given(file, validated(_GivenPlan, document, f"{file}: the plan"))


def _of_given(file: Path, found: _GivenPlan) -> Plan:
    buckets = [BucketTimes(b.name, b.warm_s, b.steady_s, b.uncovered_extra_s) for b in found.buckets]
    starts = (
        plan.given_start("miss", found.weights_s, found.build_s, found.overlap, buckets),
        plan.given_start("hit", found.weights_s, found.restore_s, found.overlap, buckets),
    )
    return _weighed(file, starts, found.buckets, found.requests, ())


def _of_reports(file: Path, found: _MeasuredPlan, directory: Path) -> Plan:
    measured = [measure(directory / one) for one in found.reports]
    starts = [one.start for one in measured]
    if len({one.model for one in measured}) > 1 or len({one.cache for one in starts}) < len(starts):
        told = ", ".join(f"{one.file} ({one.model}, {one.start.cache})" for one in measured)
        raise SettingsError(f"{told}: give reports of one model, one start that missed the cache and one that hit it")
    listed = found.buckets or _all_buckets(starts)
    refuse(f"{file}: the plan", list(_unknown_times(measured, listed)))
    planned = [_only(one, listed) for one in sorted(starts, key=lambda one: one.cache, reverse=True)]
    notes = [*(note for one in measured for note in one.notes), *_missing(starts), *_left_out(starts, listed)]
    return _weighed(file, planned, listed, found.requests, notes)


def _all_buckets(starts: Sequence[Start]) -> list[_MeasuredBucket]:
    names = dict.fromkeys(bucket.name for start in starts for bucket in start.buckets)
    return [_MeasuredBucket(name=name) for name in names]


def _unknown_times(measured: Sequence[Measured], listed: Sequence[_MeasuredBucket]) -> Iterator[str]:
    for one in measured:
        known = {bucket.name for bucket in one.start.buckets}
        for bucket in listed:
            if bucket.name not in known and None in (bucket.warm_s, bucket.steady_s, bucket.uncovered_extra_s):
                yield (
                    f"bucket {bucket.name} was not warmed in {one.file}; under `buckets`, give its warm_s, steady_s "
                    f"and uncovered_extra_s, or list the others alone"
                )


def _only(start: Start, listed: Sequence[_MeasuredBucket]) -> Start:
    """Return the start with the listed buckets; what is given of one counts instead of what was measured."""
    measured = {bucket.name: bucket for bucket in start.buckets}
    buckets = []
    for one in listed:
        given = {name: getattr(one, name) for name in ("warm_s", "steady_s", "uncovered_extra_s")}
        known = measured.get(one.name, BucketTimes(one.name, 0.0, 0.0, 0.0))
        buckets.append(replace(known, **{name: value for name, value in given.items() if value is not None}))
    return replace(start, buckets=tuple(buckets))


def _missing(starts: Sequence[Start]) -> Iterator[str]:
    for cache, compile_cache in CACHES.items():
        if cache not in {one.cache for one in starts}:
            yield (
                f"there are no rows for a {cache}: no report of a start with compile_cache {compile_cache} is given, "
                f"and what such a start costs cannot be known from others"
            )


def _left_out(starts: Sequence[Start], listed: Sequence[_MeasuredBucket]) -> Iterator[str]:
    others = {one.name for one in _all_buckets(starts)} - {one.name for one in listed}
    if others:
        yield f"not in the list of buckets and taken as never warmed: {', '.join(sorted(others))}"


def _weighed(
    file: Path,
    starts: Sequence[Start],
    listed: Listed,
    requests: Sequence[_Request] | None,
    notes: Sequence[str],
) -> Plan:
    """Return the plan with the share of each bucket, by the requests where there are some, else as given."""
    if requests is not None:
        shares, uncovered = _by_requests(file, listed, requests)
        told = f"{uncovered:.1%} of the requests fit into no bucket; they count in none of the first-request times"
        return Plan(tuple(starts), shares, (*notes, *([told] if uncovered else [])), uncovered)
    total = math.fsum(one.share for one in listed)
    if not total:
        raise SettingsError(f"{file}: every share is 0, so no request is expected; give at least one bucket a share")
    return Plan(tuple(starts), {one.name: one.share / total for one in listed}, tuple(notes))


def _by_requests(file: Path, listed: Listed, requests: Sequence[_Request]) -> tuple[dict[str, float], float]:
    names = [one.name for one in listed]
    given = [one.name for one in listed if "share" in one.model_fields_set]
    problems = [f"bucket {name} has a share, but shares come from the requests; drop one of them" for name in given]
    try:
        problems += _other_dimensions(names, requests)
        refuse(f"{file}: the plan", problems)
        return plan.attribute(names, [(one.path, one.sizes, one.count) for one in requests])
    except ValueError as error:
        raise SettingsError(f"{file}: the requests cannot be attributed to buckets: {error}") from error


def _other_dimensions(names: Sequence[str], requests: Sequence[_Request]) -> Iterator[str]:
    expected: dict[str, set[str]] = {}
    for bucket in map(Bucket.named, names):
        expected.setdefault(bucket.path, set()).update(dimension for dimension, _ in bucket.sizes)
    for number, one in enumerate(requests):
        if one.path not in expected:
            yield f"requests.{number}.path = {one.path!r}: the buckets are of {', '.join(expected)}"
        elif one.sizes.keys() != expected[one.path]:
            yield f"requests.{number} gives {sorted(one.sizes)}, expected are {sorted(expected[one.path])}"
