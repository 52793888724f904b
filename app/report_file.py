"""A start report as it comes from a file: checked completely, so that showing and comparing it cannot fail."""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from app.errors import SettingsError, printable

# A report has some ten kilobytes; what is larger is another file, or one without an end.
LARGEST = 16 << 20
MOST_PROBLEMS = 20
SOURCE = "`curl …/status` or report.file writes one"


def _printable_lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.splitlines())


Text = Annotated[str, AfterValidator(printable)]
Lines = Annotated[str, AfterValidator(_printable_lines)]
# Bounds that no true report meets: beyond them the text would have no width and sums no meaning.
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Number = Annotated[float, Field(ge=0, le=1e18)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=1 << 62)]


class Part(BaseModel):
    """A part of a report: immutable, exact about types, open for names that it does not know."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class Model(Part):
    """What was served."""

    name: Text
    version: Text


class Stage(Part):
    """A stage; times in seconds since the process started."""

    name: Text
    state: Text
    start_s: Seconds | None
    end_s: Seconds | None
    detail: Text = ""

    @property
    def seconds(self) -> float | None:
        """How long it took; None where it has not ended."""
        if self.start_s is None or self.end_s is None:
            return None
        return max(0.0, self.end_s - self.start_s)


class Deciding(Part):
    """A stage on the critical path: what it took, and how much sooner ready could have come at most."""

    stage: Text
    seconds: Seconds
    at_most_sooner_s: Seconds | None


class Weights(Part):
    """What was read, how fast, and how much of it lay in the file cache before."""

    bytes: Count = 0
    bytes_per_s: Number = 0
    mode: Text = ""
    fingerprint: Text = ""
    cached_ratio: Ratio | None = None
    disk_bytes_per_s: Number | None = None
    disk_ratio: Ratio | None = None
    notes: tuple[Text, ...] = ()


class Artifacts(Part):
    """Which engine runs, where its code came from, and what kept a stored artifact from being used."""

    engine: Text = ""
    why: Text = ""
    outcome: Text = ""
    differences: tuple[Text, ...] = ()


class Bucket(Part):
    """A bucket; times in seconds."""

    name: Text
    state: Text
    first_s: Seconds | None
    second_s: Seconds | None
    steady_s: Seconds | None
    max_error: Annotated[float, Field(ge=0)] | None
    proof: Text
    why: Text = ""


class Served(Part):
    """How shapes of one kind are served."""

    shapes: Text
    served: Text
    by: Text
    engine: Text = ""


class WarmupBudget(Part):
    """What warm-up may take, and took so far: seconds for all buckets, bytes for each (None planned: no limit)."""

    planned_s: Seconds
    used_s: Seconds | None
    planned_bytes: Count | None = None
    used_bytes: Count | None = None


class StagingBudget(Part):
    """Scratch bytes that reading may take, and took at most."""

    planned_bytes: Count
    used_bytes: Count | None


class Budgets(Part):
    """What was planned and what was used."""

    warmup: WarmupBudget
    staging: StagingBudget


class Device(Part):
    """The device that computed."""

    kind: Text = ""
    name: Text = ""
    fingerprint: Text = ""


class Failure(Part):
    """Why the start failed."""

    message: Lines
    stage: Text | None = None


class StartReport(Part):
    """A start report; what versions before this one did not write is empty."""

    model: Model
    phase: Text
    elapsed_s: Seconds
    time_to_ready_s: Seconds | None
    critical_path: tuple[Text, ...]
    critical: tuple[Deciding, ...] = ()
    file_cache: Text
    compile_cache: Text
    stages: tuple[Stage, ...]
    weights: Weights = Weights()
    artifacts: Artifacts = Artifacts()
    buckets: tuple[Bucket, ...] = ()
    coverage: tuple[Served, ...] = ()
    uncovered_policy: Text = ""
    budgets: Budgets | None = None
    device: Device = Device()
    error: Failure | None = None

    def stage(self, name: str) -> Stage | None:
        """Return a stage by its name."""
        return next((one for one in self.stages if one.name == name), None)


def document(file: Path) -> dict[str, Any]:
    """Return what a file holds that looks like a start report; raises SettingsError naming the file and the remedy."""
    try:
        with file.open("rb") as opened:
            text = opened.read(LARGEST + 1)
        found = json.loads(text) if len(text) <= LARGEST else None
    except (OSError, ValueError, RecursionError) as error:
        told = error.strerror if isinstance(error, OSError) else f"it is not JSON ({error})"
        raise SettingsError(f"{file} cannot be read as a start report: {told}; {SOURCE}") from error
    if len(text) > LARGEST:
        raise SettingsError(f"{file} is no start report: it is larger than {LARGEST} bytes; {SOURCE}")
    if not isinstance(found, dict) or "stages" not in found:
        raise SettingsError(f"{file} is no start report: it has no stages; {SOURCE}")
    return found


def read(file: Path) -> StartReport:
    """Return the report in a file; raises SettingsError that names everything wrong in it."""
    return parse(document(file), str(file))


def parse(found: Any, name: str) -> StartReport:
    """Return a document as a report; raises SettingsError that names each field, its value and what is allowed."""
    try:
        # A path that is no UTF-8 stands in a report as half a surrogate, which only Python takes for text.
        return StartReport.model_validate_json(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except ValidationError as error:
        problems = [_describe(row["type"], row["loc"], row["msg"], row["input"]) for row in error.errors()]
        more = len(problems) - MOST_PROBLEMS
        shown = problems if more <= 0 else [*problems[:MOST_PROBLEMS], f"{more} more"]
        raise SettingsError(f"{name} is no start report; {SOURCE}", shown) from None


def _describe(kind: str, location: tuple[str | int, ...], message: str, value: object) -> str:
    field = ".".join(str(part) for part in location) or "the document"
    if kind == "missing":
        return f"{field} is missing"
    if kind == "json_invalid":
        return f"{field} is not JSON: {message.removeprefix('Invalid JSON: ')}"
    shown = json.dumps(value)
    shown = shown if len(shown) < 60 else f"{shown[:57]}..."
    return f"{field} is {shown}, expected {message.removeprefix('Input should be ')}"
