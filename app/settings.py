"""The configuration: one YAML file, the environment and `--set`, parsed once; below this module neither exists."""

import difflib
import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as PydanticSettingsError

from app.buckets import Bucket, Dimension, cross
from app.errors import SettingsError
from app.servable import DATATYPES, TensorSpec

# Names of the contract whose behaviour is not in this version: refused rather than silently ignored.
NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "model.dtype": (None,),
    "model.codec": (None,),
    "warmup.samples": (None,),
    "warmup.budget_bytes": (None,),
    "uncovered": ("pad", "reject"),
    "compile.engine": ("auto", "aot", "eager"),
    "compile.on_miss": ("build", "fail"),
    "compile.require_signature": (False,),
    "compile.public_keys": ([],),
    "compile.signing_key": (None,),
    "device.kind": ("auto", "cpu"),
    "readiness.depends_on": ([],),
}


class Section(BaseModel):
    """A part of the configuration: immutable, and closed against unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


Name = Annotated[str, Field(pattern=r"^[^/\s]+$")]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0)]


class Waive(Section):
    """Glob patterns of tensors that may be missing or unexpected."""

    missing: list[str] = []
    unexpected: list[str] = []

    def allows_missing(self, name: str) -> bool:
        """The model may do without this tensor in the checkpoint."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.missing)

    def allows_unexpected(self, name: str) -> bool:
        """The checkpoint may hold this tensor though the model has none of the name."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.unexpected)


class Model(Section):
    """What is served."""

    name: Name
    version: Name = "1"
    factory: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    kwargs: dict[str, Any] = {}
    checkpoint: Path
    dtype: str | None = None
    waive: Waive = Waive()
    codec: str | None = None


class Tensor(Section):
    """An input or output of the model; a name in `shape` is a symbolic dimension."""

    name: Name
    datatype: Literal[tuple(DATATYPES)]  # type: ignore[valid-type]
    shape: list[str | Positive]
    pad: float | int | bool | None = None
    low: float | None = None
    high: float | None = None

    def spec(self) -> TensorSpec:
        """Return the plain value that the rest of the program uses."""
        return TensorSpec(self.name, self.datatype, tuple(self.shape), self.pad, self.low, self.high)


class Range(Section):
    """The promised range of a symbolic dimension and the sizes that are warmed."""

    min: Positive = 1
    max: Positive
    buckets: Annotated[list[Positive], Field(min_length=1)]

    @model_validator(mode="after")
    def _inside(self) -> Self:
        outside = [size for size in self.buckets if not self.min <= size <= self.max]
        if self.min > self.max or outside:
            raise ValueError(f"buckets {self.buckets} must lie within min {self.min} and max {self.max}")
        return self


class Tolerance(Section):
    """Largest accepted difference from the reference: |out - ref| <= atol + rtol * |ref|."""

    rtol: Annotated[float, Field(ge=0)] = 1e-4
    atol: Annotated[float, Field(ge=0)] = 1e-5


class Warmup(Section):
    """Which buckets are run before ready, and how often."""

    buckets: Literal["all"] | list[dict[str, int | bool]] = "all"
    calls: Annotated[int, Field(ge=2)] = 3
    budget_s: Annotated[float, Field(gt=0)] = 300
    budget_bytes: Positive | None = None
    samples: Path | None = None
    tolerance: Tolerance = Tolerance()


class Compile(Section):
    """How compiled code is made, kept and trusted."""

    engine: Literal["auto", "aot", "jit", "eager"] = "auto"
    on_miss: Literal["build", "eager_then_swap", "fail"] = "build"
    specialize: Literal["none", "bucket"] = "none"
    artifacts: Path = Path("/var/cache/warmgate")
    require_signature: bool = False
    public_keys: list[Path] = []
    signing_key: Path | None = None
    build_timeout_s: Annotated[float, Field(gt=0)] = 3600


class DeviceSettings(Section):
    """The device that computes."""

    kind: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    index: Annotated[int, Field(ge=0)] = 0
    threads: Positive | None = None


class Serving(Section):
    """Bounds on requests."""

    max_batch_delay_ms: Annotated[float, Field(ge=0)] = 2
    max_queue_items: Positive = 256
    max_queue_bytes: Positive = 268435456
    timeout_s: Annotated[float, Field(gt=0)] = 30
    max_body_bytes: Positive = 67108864


class Http(Section):
    """The listening socket and the way it closes."""

    host: str = "0.0.0.0"  # noqa: S104 - the kubelet probes the pod's address
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    uds: Path | None = None
    api_key_file: Path | None = None
    drain_delay_s: Seconds = 5
    drain_timeout_s: Seconds = 30


class StartupSettings(Section):
    """When a start-up counts as stalled, and what follows a failed one."""

    stall_timeout_s: Annotated[float, Field(gt=0)] = 120
    on_failure: Literal["exit", "stay"] = "exit"
    termination_log: Path = Path("/dev/termination-log")


class ReadinessSettings(Section):
    """What readiness depends on besides start-up."""

    late_compile: Literal["ignore", "degrade"] = "degrade"
    depends_on: list[Any] = []


class Memory(Section):
    """Bounds on host memory."""

    staging_bytes: Positive = 268435456
    host_limit_bytes: Positive | None = None
    reserve_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.1


class ReportSettings(Section):
    """Where the start report is written once start-up has ended."""

    file: Path | None = None


class Settings(BaseSettings):
    """The whole configuration."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix="WARMGATE_", env_nested_delimiter="__", protected_namespaces=()
    )

    model: Model
    inputs: Annotated[list[Tensor], Field(min_length=1)]
    outputs: Annotated[list[Tensor], Field(min_length=1)]
    dimensions: dict[str, Range] = {}
    warmup: Warmup = Warmup()
    uncovered: Literal["pad", "reject", "eager"] = "pad"
    compile: Compile = Compile()
    device: DeviceSettings = DeviceSettings()
    serving: Serving = Serving()
    http: Http = Http()
    startup: StartupSettings = StartupSettings()
    readiness: ReadinessSettings = ReadinessSettings()
    memory: Memory = Memory()
    report: ReportSettings = ReportSettings()

    @field_validator("inputs", "outputs")
    @classmethod
    def _distinct(cls, tensors: list[Tensor]) -> list[Tensor]:
        names = [tensor.name for tensor in tensors]
        if len(set(names)) < len(names):
            raise ValueError(f"names must differ, found {names}")
        return tensors

    @property
    def symbolic(self) -> tuple[Dimension, ...]:
        """The symbolic dimensions, in configured order."""
        return tuple(Dimension(n, r.min, r.max, tuple(sorted(set(r.buckets)))) for n, r in self.dimensions.items())

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets to warm, smallest first."""
        if self.warmup.buckets == "all":
            return cross(self.symbolic)
        rows = [(tuple((n, int(row[n])) for n in self.dimensions), row) for row in self.warmup.buckets]
        return tuple(sorted((Bucket(s, bool(r.get("required", True))) for s, r in rows), key=lambda b: b.volume))

    @property
    def input_specs(self) -> tuple[TensorSpec, ...]:
        """The inputs in call order."""
        return tuple(tensor.spec() for tensor in self.inputs)

    @property
    def output_specs(self) -> tuple[TensorSpec, ...]:
        """The outputs in the order the model returns them."""
        return tuple(tensor.spec() for tensor in self.outputs)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **_: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` has merged counts, so the order of precedence is visible there."""
        return (init_settings,)


def load(file: Path, assignments: Sequence[str] = ()) -> Settings:
    """Read file, environment and `--set` (the later wins); raises SettingsError that names every problem at once."""
    problems: list[str] = []
    merged = _merge(_merge(_read(file), _environment(problems)), _assigned(assignments, problems))
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        problems += [_describe(row["type"], row["loc"], row["msg"], row["input"]) for row in error.errors()]
        raise SettingsError(f"{file}: the configuration has {len(problems)} problem(s)", problems) from None
    problems += _contradictions(settings)
    if problems:
        raise SettingsError(f"{file}: the configuration has {len(problems)} problem(s)", problems)
    return settings


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice instead of taking the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"given twice: {sorted(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = yaml.load(file.read_text(), _StrictLoader)  # noqa: S506 - derived from SafeLoader
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror}; give a YAML file with --config") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise SettingsError(f"{file} holds {type(found).__name__}, expected a mapping with model, inputs, outputs …")
    return found


def _environment(problems: list[str]) -> dict[str, Any]:
    """Read WARMGATE_A__B=value; an unknown section is a problem here, an unknown field is found by the model."""
    try:
        found: dict[str, Any] = EnvSettingsSource(Settings, env_parse_none_str="null")()
    except PydanticSettingsError as error:
        problems.append(f"environment: {error}; lists and mappings are given as JSON")
        return {}
    known = {name.upper() for name in Settings.model_fields}
    for variable in os.environ:
        section = variable.upper().removeprefix("WARMGATE_").partition("__")[0]
        if variable.upper().startswith("WARMGATE_") and section not in known:
            problems.append(f"{variable} names no field{_nearest(section, known)}")
    return found


def _assigned(assignments: Sequence[str], problems: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not all(path.split(".")):
            problems.append(f"--set {assignment}: expected a.b=value")
            continue
        value: Any = yaml.safe_load(text) if text else None
        for name in reversed(path.split(".")):
            value = {name: value}
        found = _merge(found, value)
    return found


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _describe(kind: str, location: tuple[str | int, ...], message: str, value: object) -> str:
    """Return one problem as: field, value, what is allowed."""
    field = ".".join(str(part) for part in location)
    if kind == "missing":
        return f"{field} is not set"
    if kind == "extra_forbidden":
        return f"{field} is no field{_nearest(str(location[-1]), _fields_at(location[:-1]))}"
    shown = repr(value)
    allowed = message.removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{field} = {shown if len(shown) < 80 else shown[:77] + '...'}: {allowed}"


def _fields_at(location: tuple[str | int, ...]) -> set[str]:
    model: Any = Settings
    for part in location:
        annotation = model.model_fields[part].annotation if hasattr(model, "model_fields") and part in model.model_fields else model
        inner = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
        model = inner[0] if inner else annotation
    return set(model.model_fields) if hasattr(model, "model_fields") else set()


def _nearest(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}" if known else ""


def _contradictions(settings: Settings) -> list[str]:
    return [*_not_yet(settings), *_undeclared(settings), *_bucket_problems(settings), *_padding_problems(settings)]


def _not_yet(settings: Settings) -> Iterator[str]:
    for field, allowed in NOT_YET.items():
        value: Any = settings
        for part in field.split("."):
            value = getattr(value, part)
        if value not in allowed:
            shown = " or ".join("null" if a is None else str(a) for a in allowed)
            yield f"{field} = {value!r}: this version offers {shown}"


def _undeclared(settings: Settings) -> Iterator[str]:
    used = set()
    for kind, tensors in (("inputs", settings.inputs), ("outputs", settings.outputs)):
        for tensor in tensors:
            names = {size for size in tensor.shape if isinstance(size, str)}
            for name in sorted(names - set(settings.dimensions)):
                yield f"{kind}.{tensor.name}.shape names {name}, which is not in dimensions"
            used |= names if kind == "inputs" else set()
    for name in sorted(set(settings.dimensions) - used):
        yield f"dimensions.{name} is in no input's shape, so no request can say its size"


def _bucket_problems(settings: Settings) -> Iterator[str]:
    if settings.warmup.buckets == "all":
        return
    if not settings.warmup.buckets:
        yield "warmup.buckets = []: at least one bucket must be warmed, else ready would mean nothing"
    for index, row in enumerate(settings.warmup.buckets):
        sizes = {name: size for name, size in row.items() if name != "required"}
        if set(sizes) != set(settings.dimensions):
            yield f"warmup.buckets.{index} gives {sorted(sizes)}, expected a size for each of {sorted(settings.dimensions)}"
            continue
        for name, size in sizes.items():
            limits = settings.dimensions[name]
            if not limits.min <= size <= limits.max:
                yield f"warmup.buckets.{index}.{name} = {size}: allowed are {limits.min} to {limits.max}"


def _padding_problems(settings: Settings) -> Iterator[str]:
    if settings.compile.specialize == "bucket" and settings.uncovered == "pad":
        for tensor in settings.inputs:
            if tensor.pad is None and any(isinstance(size, str) for size in tensor.shape):
                yield f"inputs.{tensor.name}.pad is not set, but uncovered: pad with compile.specialize: bucket pads it"


def compiler_environment() -> dict[str, str]:
    """Return the variables that change what torch compiles: read here because nothing else reads the environment.

    The compiler is not among them: code is restored on machines that have none. The manifest records what built it.
    """
    names = ("TORCHINDUCTOR_", "TORCH_COMPILE", "TORCHDYNAMO_", "AOT_INDUCTOR", "ATEN_CPU_CAPABILITY")
    # Where caches lie and how many threads fill them says nothing about what is in them.
    ignored = {"TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"}
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(names) and k not in ignored}


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process: this one's, with additions."""
    return {**os.environ, **extra}
