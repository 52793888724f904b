"""The configuration is read once: file, then environment, then --set; every problem is told, all together."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from app import configure
from app.buckets import Bucket, Dimension
from app.errors import SettingsError
from app.servable import TensorSpec
from app.settings import Settings

MINIMAL: dict[str, Any] = {
    "model": {"name": "tiny", "factory": "package.module:build", "checkpoint": "/models/tiny"},
    "inputs": [{"name": "ids", "datatype": "INT64", "shape": ["batch", "sequence"], "pad": 0}],
    "outputs": [{"name": "out", "datatype": "FP32", "shape": ["batch", 4]}],
    "dimensions": {
        "batch": {"min": 1, "max": 8, "buckets": [8, 1]},
        "sequence": {"min": 2, "max": 64, "buckets": [16, 64]},
    },
}

FULL = """
model:
  name: tiny
  version: "2"
  factory: package.module:Models.build
  kwargs: {layers: 2, names: [a, b]}
  checkpoint: /models/tiny
  reading: read
  dtype: bfloat16
  sha256: /models/sha256sums
  trust_pickle: true
  wait_s: 30
  waive: {missing: ["head.*"], unexpected: ["*.position_ids"]}
  codec: a.codec:Text
  codec_kwargs: {size: 3}
inputs:
  - {name: ids, datatype: INT64, shape: [batch, sequence], pad: 0, low: 0, high: 100}
  - {name: mask, datatype: BOOL, shape: [batch, sequence], pad: false}
outputs:
  - {name: out, datatype: FP32, shape: [batch, 4]}
paths:
  count:
    inputs: [{name: ids, datatype: INT32, shape: [batch]}]
    outputs: [{name: counts, datatype: INT64, shape: [batch]}]
    buckets: [{batch: 3, required: false}]
dimensions:
  batch: {min: 1, max: 8, buckets: [8, 1, 8]}
  sequence: {min: 2, max: 64, buckets: [16, 64]}
warmup:
  buckets:
    - {batch: 8, sequence: 64, required: false}
    - {batch: 1, sequence: 16}
  calls: 2
  budget_s: 10.5
  budget_bytes: null
  samples: null
  tolerance: {rtol: 1.0e-3, atol: 0}
uncovered: reject
compile: {engine: aot, on_miss: fail, specialize: bucket, artifacts: /cache, build_timeout_s: 60, wait_s: 7,
  build_memory_bytes: 9}
device: {kind: cpu, index: 0, threads: 3}
serving: {max_batch_delay_ms: 0, max_queue_items: 1, max_queue_bytes: 2, timeout_s: 0.5, max_body_bytes: 3,
  codec_threads: 5}
http: {host: "::1", port: 0, uds: /run/x.sock, admin_port: 0, ssl_certfile: /run/cert, ssl_keyfile: /run/private,
  api_key_file: /run/key, receive_timeout_s: 3, drain_delay_s: 0, drain_timeout_s: 1}
startup: {stall_timeout_s: 5, on_failure: stay, termination_log: /tmp/log}
readiness: {late_compile: ignore, depends_on: []}
memory: {staging_bytes: 1048576, host_limit_bytes: 5, reserve_ratio: 0}
report: {file: /tmp/report.json}
"""


def dumped(found: Any) -> str:
    return yaml.safe_dump(found, sort_keys=False)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.upper().startswith("WARMGATE")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(dumped(MINIMAL))
    return path


def put(path: str, value: Any) -> dict[str, Any]:
    """Return the minimal configuration with one field replaced; `...` removes it."""
    changed = copy.deepcopy(MINIMAL)
    at: Any = changed
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        at = at[part] if isinstance(part, int) else at.setdefault(part, {})
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return changed


def problems(file: Path, *assignments: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        configure.load(file, assignments)
    found = caught.value.problems
    assert str(caught.value).split("\n")[0] == f"{file}: the configuration has {len(found)} problem(s)"
    return found


def message(file: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        configure.load(file)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_full_configuration_is_read_field_by_field(file: Path) -> None:
    file.write_text(FULL)

    assert configure.load(file).model_dump(mode="json") == {
        "model": {
            "name": "tiny",
            "version": "2",
            "factory": "package.module:Models.build",
            "kwargs": {"layers": 2, "names": ["a", "b"]},
            "checkpoint": "/models/tiny",
            "reading": "read",
            "dtype": "bfloat16",
            "sha256": "/models/sha256sums",
            "trust_pickle": True,
            "wait_s": 30.0,
            "waive": {"missing": ["head.*"], "unexpected": ["*.position_ids"]},
            "codec": "a.codec:Text",
            "codec_kwargs": {"size": 3},
        },
        "inputs": [
            {"name": "ids", "datatype": "INT64", "shape": ["batch", "sequence"], "pad": 0, "low": 0.0, "high": 100.0},
            {
                "name": "mask",
                "datatype": "BOOL",
                "shape": ["batch", "sequence"],
                "pad": False,
                "low": None,
                "high": None,
            },
        ],
        "outputs": [{"name": "out", "datatype": "FP32", "shape": ["batch", 4], "pad": None, "low": None, "high": None}],
        "paths": {
            "count": {
                "inputs": [
                    {"name": "ids", "datatype": "INT32", "shape": ["batch"], "pad": None, "low": None, "high": None}
                ],
                "outputs": [
                    {"name": "counts", "datatype": "INT64", "shape": ["batch"], "pad": None, "low": None, "high": None}
                ],
                "buckets": [{"batch": 3, "required": False}],
            }
        },
        "dimensions": {
            "batch": {"min": 1, "max": 8, "buckets": [8, 1, 8]},
            "sequence": {"min": 2, "max": 64, "buckets": [16, 64]},
        },
        "warmup": {
            "buckets": [{"batch": 8, "sequence": 64, "required": False}, {"batch": 1, "sequence": 16}],
            "calls": 2,
            "budget_s": 10.5,
            "budget_bytes": None,
            "samples": None,
            "tolerance": {"rtol": 1e-3, "atol": 0.0},
        },
        "uncovered": "reject",
        "compile": {
            "engine": "aot",
            "on_miss": "fail",
            "specialize": "bucket",
            "artifacts": "/cache",
            "require_signature": False,
            "public_keys": [],
            "signing_key": None,
            "trusted_writers": [],
            "build_timeout_s": 60.0,
            "build_memory_bytes": 9,
            "wait_s": 7.0,
        },
        "device": {"kind": "cpu", "index": 0, "threads": 3},
        "serving": {
            "max_batch_delay_ms": 0.0,
            "max_queue_items": 1,
            "max_queue_bytes": 2,
            "timeout_s": 0.5,
            "max_body_bytes": 3,
            "codec_threads": 5,
        },
        "http": {
            "host": "::1",
            "port": 0,
            "uds": "/run/x.sock",
            "admin_port": 0,
            "ssl_certfile": "/run/cert",
            "ssl_keyfile": "/run/private",
            "api_key_file": "/run/key",
            "receive_timeout_s": 3.0,
            "drain_delay_s": 0.0,
            "drain_timeout_s": 1.0,
        },
        "startup": {"stall_timeout_s": 5.0, "on_failure": "stay", "termination_log": "/tmp/log"},  # noqa: S108
        "readiness": {"late_compile": "ignore", "depends_on": []},
        "memory": {"staging_bytes": 1048576, "host_limit_bytes": 5, "reserve_ratio": 0.0},
        "report": {"file": "/tmp/report.json"},  # noqa: S108
    }


def test_a_full_configuration_gives_dimensions_buckets_and_specs_as_plain_values(file: Path) -> None:
    file.write_text(FULL)
    settings = configure.load(file)

    forward, count = settings.model_paths
    assert (forward.name, count.name) == ("forward", "count")
    assert [dimension.name for dimension in count.dimensions] == ["batch"]
    assert (count.inputs[0].datatype, count.outputs[0].name) == ("INT32", "counts")
    assert forward.dimensions == (Dimension("batch", 1, 8, (1, 8)), Dimension("sequence", 2, 64, (16, 64)))
    assert settings.buckets == (
        Bucket((("batch", 8), ("sequence", 64)), required=False),
        Bucket((("batch", 1), ("sequence", 16)), required=True),
        Bucket((("batch", 3),), required=False, path="count"),
    )
    assert forward.inputs == (
        TensorSpec("ids", "INT64", ("batch", "sequence"), 0, 0.0, 100.0),
        TensorSpec("mask", "BOOL", ("batch", "sequence"), False),
    )
    assert forward.outputs == (TensorSpec("out", "FP32", ("batch", 4)),)


def test_all_buckets_are_the_cross_product_smallest_first(file: Path) -> None:
    assert [bucket.name for bucket in configure.load(file).buckets] == [
        "batch=1,sequence=16",
        "batch=1,sequence=64",
        "batch=8,sequence=16",
        "batch=8,sequence=64",
    ]


DEFAULTS: dict[str, Any] = {
    "model.version": "1",
    "model.reading": "auto",
    "model.dtype": None,
    "model.sha256": None,
    "model.trust_pickle": False,
    "model.wait_s": 0.0,
    "warmup.buckets": "all",
    "warmup.calls": 3,
    "warmup.budget_s": 300.0,
    "warmup.tolerance": {"rtol": 1e-4, "atol": 1e-5},
    "uncovered": "pad",
    "compile.engine": "auto",
    "compile.on_miss": "build",
    "compile.artifacts": "/var/cache/warmgate",
    "device": {"kind": "auto", "index": 0, "threads": None},
    "serving": {
        "max_batch_delay_ms": 2.0,
        "max_queue_items": 256,
        "max_queue_bytes": 268435456,
        "timeout_s": 30.0,
        "max_body_bytes": 67108864,
        "codec_threads": 2,
    },
    "http": {
        "host": "0.0.0.0",  # noqa: S104
        "port": 8080,
        "uds": None,
        "admin_port": None,
        "ssl_certfile": None,
        "ssl_keyfile": None,
        "api_key_file": None,
        "receive_timeout_s": 60.0,
        "drain_delay_s": 5.0,
        "drain_timeout_s": 30.0,
    },
    "startup.stall_timeout_s": 120.0,
    "startup.on_failure": "exit",
    "readiness.late_compile": "degrade",
    "memory": {"staging_bytes": 268435456, "host_limit_bytes": None, "reserve_ratio": 0.1},
    "report.file": None,
}


@pytest.mark.parametrize(("path", "value"), DEFAULTS.items(), ids=DEFAULTS)
def test_what_is_not_given_has_the_documented_default(file: Path, path: str, value: Any) -> None:
    at: Any = configure.load(file).model_dump(mode="json")
    for part in path.split("."):
        at = at[part]

    assert at == value


@pytest.mark.parametrize(
    ("in_file", "in_environment", "assigned", "calls"),
    [
        (None, None, None, 3),
        (4, None, None, 4),
        (4, "5", None, 5),
        (4, None, "6", 6),
        (None, "5", None, 5),
        (None, "5", "6", 6),
        (4, "5", "6", 6),
    ],
)
def test_the_environment_wins_over_the_file_and_an_assignment_over_both(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_file: int | None,
    in_environment: str | None,
    assigned: str | None,
    calls: int,
) -> None:
    if in_file:
        file.write_text(dumped(put("warmup.calls", in_file)))
    if in_environment:
        monkeypatch.setenv("WARMGATE_WARMUP__CALLS", in_environment)

    assert configure.load(file, [f"warmup.calls={assigned}"] if assigned else []).warmup.calls == calls


@pytest.mark.parametrize(
    ("variable", "value", "read", "expected"),
    [
        ("WARMGATE_HTTP__PORT", "9", lambda s: (s.http.port, s.http.drain_delay_s), (9, 5.0)),
        ("WARMGATE_UNCOVERED", "reject", lambda s: s.uncovered, "reject"),
        ("warmgate_uncovered", "reject", lambda s: s.uncovered, "reject"),
        ("WARMGATE_MODEL__CHECKPOINT", "/other", lambda s: s.model.checkpoint, Path("/other")),
        ("WARMGATE_MODEL", '{"name": "b"}', lambda s: (s.model.name, s.model.version), ("b", "1")),
        ("WARMGATE_DIMENSIONS__BATCH__MAX", "9", lambda s: s.dimensions["batch"].max, 9),
        ("WARMGATE_REPORT__FILE", "null", lambda s: s.report.file, None),
        (
            "WARMGATE_WARMUP__BUCKETS",
            '[{"batch": 1, "sequence": 16}]',
            lambda s: s.buckets,
            (Bucket((("batch", 1), ("sequence", 16))),),
        ),
    ],
)
def test_each_field_can_come_from_the_environment(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    read: Callable[[Settings], Any],
    expected: Any,
) -> None:
    monkeypatch.setenv(variable, value)

    assert read(configure.load(file)) == expected


@pytest.mark.parametrize(
    ("assignments", "read", "expected"),
    [
        (["model.name=x"], lambda s: (s.model.name, s.model.version), ("x", "1")),
        (["warmup.calls=4", "warmup.calls=5"], lambda s: s.warmup.calls, 5),
        (["warmup.calls=4", "warmup.budget_s=9"], lambda s: (s.warmup.calls, s.warmup.budget_s), (4, 9.0)),
        (["dimensions.batch.buckets=[2]"], lambda s: s.dimensions["batch"].buckets, [2]),
        (["report.file="], lambda s: s.report.file, None),
        (["http.host=a=b"], lambda s: s.http.host, "a=b"),
        (['model.version="7"'], lambda s: s.model.version, "7"),
    ],
)
def test_an_assignment_takes_a_yaml_value(
    file: Path, assignments: list[str], read: Callable[[Settings], Any], expected: Any
) -> None:
    assert read(configure.load(file, assignments)) == expected


KINDS = (
    "'BOOL', 'UINT8', 'UINT16', 'UINT32', 'UINT64', 'INT8', 'INT16', 'INT32', 'INT64', 'FP16', 'FP32', 'FP64' or 'BF16'"
)
TWICE = [{"name": "o", "datatype": "FP32", "shape": [1]}] * 2

# field, value → the problem that is told
MISTAKES: list[tuple[str, Any, str]] = [
    ("modle", {}, "modle is no field; did you mean model?"),
    ("model.nmae", "x", "model.nmae is no field; did you mean name?"),
    ("model.waive.mising", [], "model.waive.mising is no field; did you mean missing?"),
    ("inputs.0.dtype", "INT64", "inputs.0.dtype is no field; did you mean datatype?"),
    ("dimensions.batch.sizes", [1], "dimensions.batch.sizes is no field; known: buckets, max, min"),
    (
        "http.zzz",
        1,
        "http.zzz is no field; known: admin_port, api_key_file, drain_delay_s, drain_timeout_s, host, port, "
        "receive_timeout_s, ssl_certfile, ssl_keyfile, uds",
    ),
    ("model", ..., "model is not set"),
    ("model.name", ..., "model.name is not set"),
    ("dimensions.batch.max", ..., "dimensions.batch.max is not set"),
    ("model", None, "model = None: a valid dictionary or instance of Model"),
    ("model.name", "a/b", r"model.name = 'a/b': String should match pattern '^[^/\s]+$'"),
    ("model.name", "", r"model.name = '': String should match pattern '^[^/\s]+$'"),
    ("model.version", 2, "model.version = 2: a valid string"),
    ("model.reading", "mmap", "model.reading = 'mmap': 'auto', 'map' or 'read'"),
    ("model.dtype", "BF16", "model.dtype = 'BF16': 'float16', 'bfloat16', 'float32' or 'float64'"),
    ("model.wait_s", -1, "model.wait_s = -1: greater than or equal to 0"),
    ("memory.staging_bytes", 1048575, "memory.staging_bytes = 1048575: greater than or equal to 1048576"),
    ("model.factory", "module", r"model.factory = 'module': String should match pattern '^[\w.]+:[\w.]+$'"),
    ("warmup.calls", 1, "warmup.calls = 1: greater than or equal to 2"),
    ("warmup.calls", "many", "warmup.calls = 'many': a valid integer, unable to parse string as an integer"),
    ("warmup.calls", 2.5, "warmup.calls = 2.5: a valid integer, got a number with a fractional part"),
    ("warmup.tolerance.rtol", -1, "warmup.tolerance.rtol = -1: greater than or equal to 0"),
    ("http.port", 70000, "http.port = 70000: less than or equal to 65535"),
    ("http.port", None, "http.port = None: without http.uds no request could reach the model"),
    ("http.admin_port", 8080, "http.admin_port = 8080: is http.port; probes and metrics answer there as well"),
    ("http.ssl_certfile", "/c", "http.ssl_certfile = '/c': needs http.ssl_keyfile"),
    ("http.ssl_keyfile", "/k", "http.ssl_keyfile = '/k': needs http.ssl_certfile"),
    (
        "http",
        {"port": None, "uds": "/s", "ssl_certfile": "/c", "ssl_keyfile": "/k"},
        "http.ssl_certfile = '/c': there is no http.port, and http.uds is not encrypted",
    ),
    ("http.drain_delay_s", -1, "http.drain_delay_s = -1: greater than or equal to 0"),
    ("serving.timeout_s", 0, "serving.timeout_s = 0: greater than 0"),
    ("memory.reserve_ratio", 1, "memory.reserve_ratio = 1: less than 1"),
    ("startup.on_failure", "pray", "startup.on_failure = 'pray': 'exit' or 'stay'"),
    ("uncovered", "maybe", "uncovered = 'maybe': 'pad', 'reject' or 'eager'"),
    ("device.kind", "tpu", "device.kind = 'tpu': 'auto', 'cpu', 'cuda' or 'npu'"),
    ("inputs", [], "inputs = []: say what forward takes, or name other methods under paths"),
    ("outputs", [], "outputs = []: say what forward returns, or name other methods under paths"),
    ("inputs.0.datatype", "BYTES", f"inputs.0.datatype = 'BYTES': {KINDS}"),
    ("outputs", TWICE, f"outputs = {str(TWICE)[:77]}...: names must differ, found ['o', 'o']"),
    (
        "dimensions.batch.buckets",
        [1, 9],
        "dimensions.batch = {'min': 1, 'max': 8, 'buckets': [1, 9]}: buckets [1, 9] must lie within min 1 and max 8",
    ),
    (
        "dimensions.batch.min",
        9,
        "dimensions.batch = {'min': 9, 'max': 8, 'buckets': [8, 1]}: buckets [8, 1] must lie within min 9 and max 8",
    ),
    (
        "dimensions.batch.buckets",
        [],
        "dimensions.batch.buckets = []: List should have at least 1 item after validation, not 0",
    ),
    ("inputs.0.shape", ["batch", "sequence", "deep"], "inputs.ids.shape names deep, which is not in dimensions"),
    ("outputs.0.shape", ["batch", "wide"], "outputs.out.shape names wide, which is not in dimensions"),
    ("inputs.0.shape", ["batch", 4], "dimensions.sequence is in no input's shape, so no request can say its size"),
    (
        "dimensions.deep",
        {"max": 3, "buckets": [1]},
        "dimensions.deep is in no input's shape, so no request can say its size",
    ),
    (
        "warmup.buckets",
        [],
        "warmup.buckets = []: at least one bucket must be warmed, else ready would mean nothing",
    ),
    ("warmup.buckets", [{"batch": 1}], "warmup.buckets.0 gives ['batch'], expected are ['batch', 'sequence']"),
    (
        "warmup.buckets",
        [{"batch": 1, "sequence": 16}, {"batch": 1, "sequence": 65}],
        "warmup.buckets.1.sequence = 65: allowed are 2 to 64",
    ),
    (
        "dimensions",
        {
            "batch": {"min": 1, "max": 64, "buckets": list(range(1, 34))},
            "sequence": {"min": 2, "max": 64, "buckets": list(range(2, 34))},
        },
        "the configuration makes 1056 buckets; allowed are 1024, list those that matter",
    ),
    (
        "warmup.buckets",
        [{"batch": 1, "sequence": 16}] * 1025,
        "the configuration makes 1025 buckets; allowed are 1024, list those that matter",
    ),
    ("model.codec", "a", "model.codec = 'a': String should match pattern '^[\\w.]+:\\w+$'"),
    ("model.codec_kwargs", {"a": 1}, "model.codec_kwargs = {'a': 1}: needs model.codec"),
    (
        "compile.require_signature",
        True,
        "compile.require_signature = True: needs compile.public_keys, the keys whose signatures count",
    ),
    (
        "compile.public_keys",
        ["/absent"],
        "compile.public_keys.0 = '/absent': /absent cannot be read: No such file or directory; "
        "give a key file made by keygen",
    ),
    (
        "compile.signing_key",
        "/absent",
        "compile.signing_key = '/absent': /absent cannot be read: No such file or directory; "
        "give a key file made by keygen",
    ),
    (
        "compile.trusted_writers",
        ["group"],
        r"compile.trusted_writers.0 = 'group': String should match pattern '^(anyone|[ug]id:\d+)$'",
    ),
    ("device.kind", "cuda", "device.kind = 'cuda': this version offers auto or cpu"),
    ("device.kind", "npu", "device.kind = 'npu': this version offers auto or cpu"),
    ("readiness.depends_on", ["http://x"], "readiness.depends_on = ['http://x']: this version offers []"),
]


@pytest.mark.parametrize(
    ("path", "value", "problem"), MISTAKES, ids=[f"{path}-{number}" for number, (path, *_) in enumerate(MISTAKES)]
)
def test_one_mistake_is_one_problem_with_field_value_and_what_is_allowed(
    file: Path, path: str, value: Any, problem: str
) -> None:
    file.write_text(dumped(put(path, value)))

    assert problems(file) == (problem,)


TENSOR = {"name": "n", "datatype": "INT8", "shape": ["batch"]}
PATH = {"inputs": [TENSOR], "outputs": [{**TENSOR, "name": "out"}]}


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (
            {"forward": PATH},
            "paths.forward.[key] = 'forward': what forward takes and gives stands in inputs and outputs",
        ),
        ({"2x": PATH}, "paths.2x.[key] = '2x': String should match pattern '^[A-Za-z_]\\w*$'"),
        ({"count": {"outputs": [TENSOR]}}, "paths.count.inputs is not set"),
        ({"count": {**PATH, "bucktes": []}}, "paths.count.bucktes is no field; did you mean buckets?"),
        (
            {"count": {**PATH, "buckets": []}},
            "paths.count.buckets = []: at least one bucket must be warmed, else ready would mean nothing",
        ),
        ({"count": {**PATH, "buckets": [{"batch": 9}]}}, "paths.count.buckets.0.batch = 9: allowed are 1 to 8"),
        (
            {"count": {**PATH, "buckets": [{"batch": 1}, {"batch": 1, "required": False}]}},
            "paths.count.buckets gives batch=1 twice",
        ),
        (
            {"count": {**PATH, "buckets": [{"batch": 1, "sequence": 2}]}},
            "paths.count.buckets.0 gives ['batch', 'sequence'], expected are ['batch']",
        ),
        (
            {"count": {**PATH, "outputs": [{**TENSOR, "shape": ["sequence"]}]}},
            "paths.count.outputs.n.shape names sequence, which is in no shape of an input of count",
        ),
        (
            {"count": {**PATH, "inputs": [{**TENSOR, "high": -129}]}},
            "paths.count.inputs.n.high = -129.0: not a value of INT8",
        ),
    ],
)
def test_one_mistake_in_a_path_is_one_problem_with_its_place(file: Path, paths: Any, problem: str) -> None:
    file.write_text(dumped(put("paths", paths)))

    assert problems(file) == (problem,)


def test_what_is_said_of_a_forward_that_is_not_served_is_a_problem(file: Path) -> None:
    without = put("paths", {"count": {**PATH, "inputs": [{**TENSOR, "shape": ["batch", "sequence"]}]}})
    del without["inputs"]
    without["warmup"] = {"buckets": [{"batch": 1, "sequence": 2}]}
    file.write_text(dumped(without))

    assert problems(file) == (
        "inputs = []: say what forward takes, or name other methods under paths",
        "warmup.buckets lists buckets of forward, which has no inputs; list those of a path under paths",
    )
    del without["outputs"], without["warmup"]
    file.write_text(dumped(without))
    assert [path.name for path in configure.load(file).model_paths] == ["count"]


def test_an_input_that_would_be_padded_needs_a_value_to_pad_with(file: Path) -> None:
    file.write_text(dumped(put("inputs.0.pad", ...)))

    for how in ("compile.specialize=bucket", "compile.engine=jit"):
        assert problems(file, how) == ("inputs.ids.pad is not set, but uncovered: pad with one code a bucket pads it",)
    assert configure.load(file, ["compile.specialize=bucket", "uncovered=reject"]).inputs[0].pad is None


def test_all_mistakes_of_file_environment_and_assignments_are_told_at_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(dumped(put("model.nmae", "x")))
    monkeypatch.setenv("WARMGATE_MODLE__NAME", "x")
    monkeypatch.setenv("WARMGATE_HTTP__PORT", "-1")

    assert problems(file, "warmup", "warmup.calls=1") == (
        "WARMGATE_MODLE__NAME names no field; did you mean MODEL?",
        "--set warmup: expected a.b=value",
        "model.nmae is no field; did you mean name?",
        "warmup.calls = 1: greater than or equal to 2",
        "http.port = '-1': greater than or equal to 0",
    )


def test_all_contradictions_are_told_at_once(file: Path) -> None:
    assert problems(
        file, "device.kind=cuda", "readiness.depends_on=[a]", "warmup.buckets=[{batch: 9, sequence: 1}]"
    ) == (
        "device.kind = 'cuda': this version offers auto or cpu",
        "readiness.depends_on = ['a']: this version offers []",
        "warmup.buckets.0.batch = 9: allowed are 1 to 8",
        "warmup.buckets.0.sequence = 1: allowed are 2 to 64",
    )


KNOWN = (
    "COMPILE, DEVICE, DIMENSIONS, HTTP, INPUTS, MEMORY, MODEL, OUTPUTS, PATHS, READINESS, REPORT, SERVING, STARTUP, "
    "UNCOVERED, WARMUP"
)


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("WARMGATE_MODLE__NAME", "x", "WARMGATE_MODLE__NAME names no field; did you mean MODEL?"),
        ("WARMGATE_XYZ", "x", f"WARMGATE_XYZ names no field; known: {KNOWN}"),
        ("WARMGATE_MODEL__NMAE", "x", "model.nmae is no field; did you mean name?"),
        ("WARMGATE_WARMUP__CALLS", "1", "warmup.calls = '1': greater than or equal to 2"),
        (
            "WARMGATE_INPUTS",
            "ids",
            'environment: error parsing value for field "inputs" from source "EnvSettingsSource"; '
            "lists and mappings are given as JSON",
        ),
    ],
)
def test_a_variable_that_cannot_be_used_is_a_problem(
    file: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, problem: str
) -> None:
    monkeypatch.setenv(variable, value)

    assert problems(file) == (problem,)


def test_variables_of_other_programs_are_left_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMGATES_X", "1")
    monkeypatch.setenv("MY_WARMGATE_X", "1")

    assert configure.load(file).model.name == "tiny"


@pytest.mark.parametrize("assignment", ["warmup", "=3", "warmup..calls=3", ".calls=3", "warmup.=3"])
def test_an_assignment_without_path_or_value_is_a_problem(file: Path, assignment: str) -> None:
    assert problems(file, assignment) == (f"--set {assignment}: expected a.b=value",)


@pytest.mark.parametrize("assignment", ["warmup.calls=[1", "model.kwargs={a: 1", "model.name=@x", 'model.name="x'])
def test_an_assignment_whose_value_is_not_yaml_is_a_problem(file: Path, assignment: str) -> None:
    assert [problem.startswith(f"--set {assignment}: ") for problem in problems(file, assignment)] == [True]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "{file} holds NoneType, expected a mapping with model, inputs, outputs …"),
        ("- model", "{file} holds list, expected a mapping with model, inputs, outputs …"),
        ("model", "{file} holds str, expected a mapping with model, inputs, outputs …"),
        (
            "a: [",
            "{file} is not YAML: while parsing a flow node expected the node content, but found '<stream end>' in "
            '"<unicode string>", line 1, column 5: a: [ ^',
        ),
        (
            "model: {name: a, name: b}",
            "{file} is not YAML: given twice: ['name'] in \"<unicode string>\", line 1, column 8: "
            "model: {{name: a, name: b}} ^",
        ),
        (
            "b: 1\na: 1\nb: 2\na: 2\n",
            "{file} is not YAML: given twice: ['a', 'b'] in \"<unicode string>\", line 1, column 1: b: 1 ^",
        ),
        (
            "a: !!python/name:os.system",
            "{file} is not YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/name:os.system' in \"<unicode string>\", line 1, column 4: "
            "a: !!python/name:os.system ^",
        ),
    ],
)
def test_a_file_that_is_no_yaml_mapping_is_refused(file: Path, text: str, told: str) -> None:
    file.write_text(text)

    assert message(file) == told.format(file=file)


def test_a_file_that_is_not_there_is_refused_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "absent.yaml"

    assert message(file) == f"{file} cannot be read: No such file or directory; give a YAML file with --config"


def test_a_directory_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    assert message(tmp_path) == f"{tmp_path} cannot be read: Is a directory; give a YAML file with --config"


def test_a_file_that_is_not_text_is_refused_by_its_name(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00model")

    assert message(file).startswith(f"{file} ")


@pytest.mark.parametrize("key", ["1", "true", "null", "2026-01-01"])
def test_a_top_level_key_that_is_no_text_is_an_unknown_field(file: Path, key: str) -> None:
    file.write_text(f"{dumped(MINIMAL)}\n{key}: 1\n")

    assert len(problems(file)) == 1


def test_a_merge_key_of_yaml_takes_the_fields_of_its_anchor(file: Path) -> None:
    text = dumped(put("dimensions", ...))
    file.write_text(
        f"{text}dimensions:\n  batch: &range {{min: 2, max: 8, buckets: [8]}}\n  sequence: {{<<: *range, max: 9}}\n"
    )

    (forward,) = configure.load(file).model_paths
    assert forward.dimensions == (Dimension("batch", 2, 8, (8,)), Dimension("sequence", 2, 9, (8,)))


def test_a_configuration_cannot_be_changed_once_it_is_read(file: Path) -> None:
    settings = configure.load(file)

    with pytest.raises(ValueError, match="frozen"):
        settings.uncovered = "reject"


@pytest.mark.parametrize(
    "name",
    [
        "WARMGATE_PORT",
        "WARMGATE_SERVICE_HOST",
        "WARMGATE_SERVICE_PORT",
        "WARMGATE_SERVICE_PORT_HTTP",
        "WARMGATE_PORT_8080_TCP",
        "WARMGATE_PORT_8080_TCP_ADDR",
        "WARMGATE_BATCH_SERVICE_HOST",
    ],
)
def test_what_kubernetes_sets_for_a_service_named_warmgate_is_not_taken_for_configuration(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "tcp://10.0.0.1:8080")
    assert configure.load(file).model.name == "tiny"
