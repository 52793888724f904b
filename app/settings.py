"""The configuration as a value: every field, its default and what is allowed. `configure` reads it."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from app.buckets import FORWARD, Bucket, Dimension, cross
from app.paths import ModelPath
from app.servable import BYTES, DATATYPES, TensorSpec


class Section(BaseModel):
    """A part of the configuration: immutable, and closed against unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


Name = Annotated[str, Field(pattern=r"^[^/\s]+$")]
PythonName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0)]
# BYTES are for people and other programs; the model itself takes and gives numbers.
MODEL_DATATYPES = tuple(name for name in DATATYPES if name != BYTES)
CASTS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
CastType = Literal["float16", "bfloat16", "float32", "float64"]


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
    reading: Literal["auto", "map", "read"] = "auto"
    dtype: CastType | None = None
    sha256: str | None = None
    trust_pickle: bool = False
    wait_s: Seconds = 0
    waive: Waive = Waive()
    codec: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    codec_kwargs: dict[str, Any] = {}

    @property
    def cast(self) -> str | None:
        """The dtype that floating-point tensors are cast to, named as in safetensors; None as stored."""
        return CASTS[self.dtype] if self.dtype else None


class Tensor(Section):
    """An input or output of the model; a name in `shape` is a symbolic dimension."""

    name: Name
    datatype: Literal[MODEL_DATATYPES]  # type: ignore[valid-type]
    shape: list[str | Positive]
    pad: float | int | bool | None = None
    low: float | None = None
    high: float | None = None

    def spec(self) -> TensorSpec:
        """Return the plain value that the rest of the program uses."""
        return TensorSpec(self.name, self.datatype, tuple(self.shape), self.pad, self.low, self.high)


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        raise ValueError(f"names must differ, found {names}")
    return tensors


def _no_forward(name: str) -> str:
    if name == FORWARD:
        raise ValueError("what forward takes and gives stands in inputs and outputs")
    return name


MethodName = Annotated[PythonName, AfterValidator(_no_forward)]


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


Tensors = Annotated[list[Tensor], AfterValidator(_distinct)]
# All combinations, or a list of sizes by dimension, with `required`.
Buckets = Literal["all"] | list[dict[str, int | bool]]


class PathSettings(Section):
    """A method of the module that is served beside `forward`, or instead of it."""

    inputs: Annotated[Tensors, Field(min_length=1)]
    outputs: Annotated[Tensors, Field(min_length=1)]
    buckets: Buckets = "all"


class Tolerance(Section):
    """Largest accepted difference from the reference: |out - ref| <= atol + rtol * |ref|."""

    rtol: Annotated[float, Field(ge=0)] = 1e-4
    atol: Annotated[float, Field(ge=0)] = 1e-5


class Warmup(Section):
    """Which buckets are run before ready, and how often."""

    buckets: Buckets = "all"
    calls: Annotated[int, Field(ge=2)] = 3
    budget_s: Annotated[float, Field(gt=0)] = 300
    budget_bytes: Positive | None = None
    samples: str | None = None
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
    trusted_writers: list[Annotated[str, Field(pattern=r"^(anyone|[ug]id:\d+)$")]] = []
    build_timeout_s: Annotated[float, Field(gt=0)] = 3600
    build_memory_bytes: Positive | None = None
    wait_s: Seconds = 3600


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
    codec_threads: Positive = 2


Port = Annotated[int, Field(ge=0, le=65535)]


class Http(Section):
    """The listening sockets, who may ask, and the way they close."""

    host: str = "0.0.0.0"  # noqa: S104 - the kubelet probes the pod's address
    port: Port | None = 8080
    uds: Path | None = None
    admin_port: Port | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    api_key_file: Path | None = None
    receive_timeout_s: Annotated[float, Field(gt=0)] = 60
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

    staging_bytes: Annotated[int, Field(ge=1048576)] = 268435456
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
    inputs: Tensors = []
    outputs: Tensors = []
    paths: dict[MethodName, PathSettings] = {}
    dimensions: dict[PythonName, Range] = {}
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

    @property
    def configured_paths(self) -> dict[str, PathSettings]:
        """What is configured for every path by its name: `forward` first, where inputs are given for it."""
        if not self.inputs:
            return dict(self.paths)
        own = PathSettings.model_construct(inputs=self.inputs, outputs=self.outputs, buckets=self.warmup.buckets)
        return {FORWARD: own, **self.paths}

    @property
    def model_paths(self) -> tuple[ModelPath, ...]:
        """The paths that are served; a request that names none takes the first."""
        return tuple(self._model_path(name, path) for name, path in self.configured_paths.items())

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of all paths in the order of warming."""
        return tuple(bucket for path in self.model_paths for bucket in path.buckets)

    def ranges(self, path: PathSettings) -> dict[str, Range]:
        """Return the dimensions that the inputs of a path name, in configured order."""
        used = frozenset[str]().union(*(tensor.spec().symbolic for tensor in path.inputs))
        return {name: limits for name, limits in self.dimensions.items() if name in used}

    def _model_path(self, name: str, path: PathSettings) -> ModelPath:
        inputs, outputs = (tuple(tensor.spec() for tensor in tensors) for tensors in (path.inputs, path.outputs))
        ranges = self.ranges(path)
        dimensions = tuple(Dimension(n, r.min, r.max, tuple(sorted(set(r.buckets)))) for n, r in ranges.items())
        return ModelPath(name, inputs, outputs, dimensions, _buckets(name, dimensions, path.buckets))

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *sources: PydanticBaseSettingsSource, **named: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `configure.load` has merged counts, so the order of precedence is visible there."""
        return (named["init_settings"],)


def _buckets(path: str, dimensions: Sequence[Dimension], listed: Buckets) -> tuple[Bucket, ...]:
    """Return the buckets to warm: all of them smallest first, or those that are listed as they are listed."""
    if listed == "all":
        return cross(dimensions, path)
    rows = [(tuple((one.name, int(row[one.name])) for one in dimensions), row) for row in listed]
    return tuple(Bucket(sizes, bool(row.get("required", True)), path) for sizes, row in rows)
