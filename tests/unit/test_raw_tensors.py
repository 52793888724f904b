"""Raw tensors behind the JSON, and bodies that are nothing but one: exact both ways, hostile sizes refused in words."""

import struct
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.http.wire import Ask, Head, Wanted, decode, encode
from app.paths import ModelPath
from app.servable import DATATYPES, Array, Rejected, TensorSpec

LIMIT = 100_000
OUTPUTS = (TensorSpec("y", "FP32", ("batch", 2)), TensorSpec("z", "INT64", ("batch",)))
FIXED = [name for name in DATATYPES if name != "BYTES"]


def path(*inputs: TensorSpec) -> tuple[ModelPath, ...]:
    return (ModelPath("forward", inputs or (TensorSpec("x", "INT64", ("batch", 2)),), OUTPUTS, (), ()),)


def raw_row(raw: bytes, datatype: str = "INT64", shape: Any = (1, 2), name: str = "x", **more: Any) -> dict[str, Any]:
    parameters = {"binary_data_size": len(raw), **more}
    return {"name": name, "datatype": datatype, "shape": list(shape), "parameters": parameters}


def request(*rows: dict[str, Any], behind: bytes = b"", **fields: Any) -> tuple[Head, bytes]:
    head = orjson.dumps({"inputs": list(rows), **fields})
    return Head("", str(len(head))), head + behind


def asked(head: Head, body: bytes, paths: Any = None) -> Ask:
    return decode(head, body, paths or path(), LIMIT)


def refusal(head: Head, body: bytes, paths: Any = None) -> tuple[int, str]:
    with pytest.raises(Rejected) as caught:
        asked(head, body, paths)
    return caught.value.status, str(caught.value)


def status(head: Head, body: bytes) -> int:
    try:
        asked(head, body)
    except Rejected as rejected:
        return rejected.status
    return 200


def sent(spec: TensorSpec, array: Array) -> tuple[dict[str, Any], bytes]:
    found = encode("m", "1", Ask("forward", {}, (Wanted(spec, raw=True),)), {spec.name: array})
    assert found.json_bytes is not None
    return orjson.loads(found.body[: found.json_bytes])["outputs"][0], found.body[found.json_bytes :]


@given(st.data())
def test_every_bit_of_every_datatype_survives_both_ways(data: st.DataObject) -> None:
    datatype = data.draw(st.sampled_from(FIXED))
    dtype = np.dtype(DATATYPES[datatype])
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3)))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = data.draw(st.binary(min_size=size, max_size=size))
    if datatype == "BOOL":
        raw = bytes(byte & 1 for byte in raw)

    array = asked(*request(raw_row(raw, datatype, shape), behind=raw)).arrays["x"]
    row, back = sent(TensorSpec("out", datatype, shape), array)

    assert (array.dtype, array.shape, array.tobytes()) == (dtype, shape, raw)
    assert (row["datatype"], row["shape"], row["parameters"]) == (datatype, list(shape), {"binary_data_size": size})
    assert back == raw


@given(st.lists(st.binary(max_size=20), max_size=6))
def test_bytes_of_any_content_survive_both_ways(elements: list[bytes]) -> None:
    raw = b"".join(struct.pack("<I", len(one)) + one for one in elements)

    array = asked(*request(raw_row(raw, "BYTES", [len(elements)]), behind=raw)).arrays["x"]
    row, back = sent(TensorSpec("out", "BYTES", ("n",)), array)

    assert (array.dtype, array.tolist()) == (np.dtype(object), elements)
    assert (row["shape"], row["parameters"]["binary_data_size"], back) == ([len(elements)], len(raw), raw)


@given(st.lists(st.text(max_size=20), min_size=4, max_size=4))
def test_texts_in_json_are_bytes_of_utf8_flat_and_nested(texts: list[str]) -> None:
    bodies = [
        orjson.dumps({"inputs": [{"name": "x", "datatype": "BYTES", "shape": [2, 2], "data": data}]})
        for data in (texts, [texts[:2], texts[2:]])
    ]
    for body in bodies:
        array = asked(Head(), body).arrays["x"]
        answer = encode("m", "1", Ask("forward", {}, (Wanted(TensorSpec("o", "BYTES", (2, 2))),)), {"o": array})

        assert array.tolist() == [[text.encode() for text in texts[:2]], [text.encode() for text in texts[2:]]]
        assert orjson.loads(answer.body)["outputs"][0]["data"] == texts


def test_raw_and_json_inputs_stand_side_by_side_and_take_their_bytes_in_order() -> None:
    first, last = np.array([[1, 2]]).tobytes(), np.array([[7.5, 8.5]], np.float32).tobytes()
    json_row = {"name": "b", "datatype": "UINT8", "shape": [1], "data": [5]}
    rows = [raw_row(first, name="a"), json_row, raw_row(last, "FP32", name="c")]

    found = asked(*request(*rows, behind=first + last)).arrays

    assert {name: array.tolist() for name, array in found.items()} == {"a": [[1, 2]], "b": [5], "c": [[7.5, 8.5]]}


def test_a_header_that_covers_the_whole_body_is_plain_json() -> None:
    row = {"name": "x", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}

    assert asked(*request(row)).arrays["x"].tolist() == [[1, 2]]


RAW = np.array([[1, 2]]).tobytes()
REFUSED: list[tuple[list[dict[str, Any]], bytes, str]] = [
    ([raw_row(RAW)], RAW[:-1], "input x: binary_data_size = 16, but 15 bytes are left"),
    ([raw_row(RAW)], RAW + b"\0", "17 bytes follow the JSON, the inputs' binary_data_size take 16"),
    ([raw_row(RAW, shape=[2, 2])], RAW, "input x: 16 bytes for INT64 of shape [2, 2], expected 32"),
    ([raw_row(RAW, shape=[2**40, 2**40])], RAW, f"input x: 16 bytes for INT64 of shape [{2**40}, {2**40}], expected "),
    ([{**raw_row(RAW), "data": [1, 2]}], RAW, "input x: both data and binary_data_size; give one of "),
    ([raw_row(RAW, binary_data_size=-1)], RAW, "input x: binary_data_size must be a whole number, got -1"),
    ([raw_row(RAW, binary_data_size="16")], RAW, "input x: binary_data_size must be a whole number, got '16'"),
    ([raw_row(RAW, binary_data_size=True)], RAW, "input x: binary_data_size must be a whole number, got True"),
    ([raw_row(RAW, binary_data_size=2**60)], RAW, f"input x: binary_data_size = {2**60}, but 16 bytes are left"),
    ([raw_row(b"\2", "BOOL", [1])], b"\2", "input x: a byte of BOOL is neither 0 nor 1"),
    ([raw_row(b"\xff" * 4, "BYTES", [1])], b"\xff" * 4, "input x: element 0 goes beyond its binary_data_size"),
    ([raw_row(b"\0\0", "BYTES", [1])], b"\0\0", "input x: element 0 goes beyond its binary_data_size"),
    ([raw_row(b"\0" * 4, "BYTES", [2])], b"\0" * 4, "input x: 1 elements, expected 2"),
    ([raw_row(b"\0" * 8, "BYTES", [1])], b"\0" * 8, "input x: more than 1 elements, expected 1"),
    ([raw_row(b"", "BYTES", [2**62])], b"", f"input x: 0 elements, expected {2**62}"),
    ([raw_row(b"", "INT64", [0, 2**62, 4])], b"", "input x: no array has the shape "),
]


@pytest.mark.parametrize(("rows", "behind", "text"), REFUSED)
def test_raw_bytes_that_are_not_what_the_json_says_are_refused_by_name(
    rows: list[dict[str, Any]], behind: bytes, text: str
) -> None:
    status, told = refusal(*request(*rows, behind=behind))

    assert (status, told[: len(text)]) == (400, text)


@pytest.mark.parametrize("told", ["-1", "x", "", "1.0", "9" * 30, "²", "+5", "10_0", "999"])
def test_a_header_that_is_no_length_within_the_body_is_refused(told: str) -> None:
    body = b'{"inputs": []}'

    status, text = refusal(Head("", told), body)

    assert (status, text.partition(": ")[0]) == (400, f"Inference-Header-Content-Length = {told!r}")


@pytest.mark.parametrize(
    ("shape", "raw", "made"),
    [
        (("batch", 2), np.array([1, 2]).tobytes(), [[1, 2]]),
        ((2, "width"), np.array([1, 2, 3, 4]).tobytes(), [[1, 2], [3, 4]]),
        (("batch", "width"), np.array([1, 2, 3]).tobytes(), [[1, 2, 3]]),
        (("batch",), np.array([1, 2, 3]).tobytes(), [1, 2, 3]),
        ((2,), np.array([1, 2]).tobytes(), [1, 2]),
    ],
)
def test_a_bare_tensor_is_the_only_input_and_all_outputs_go_back_raw(shape: Any, raw: bytes, made: Any) -> None:
    found = asked(Head("", "0"), raw, path(TensorSpec("x", "INT64", shape)))

    assert found.arrays["x"].tolist() == made
    assert [(one.spec.name, one.raw) for one in found.wanted] == [("y", True), ("z", True)]


def test_a_bare_element_of_bytes_is_one_text() -> None:
    raw = struct.pack("<I", 2) + b"hi"

    assert asked(Head("", "0"), raw, path(TensorSpec("x", "BYTES", ("batch",)))).arrays["x"].tolist() == [b"hi"]


@pytest.mark.parametrize(
    ("inputs", "raw", "text"),
    [
        ([TensorSpec("a", "INT64", (1,)), TensorSpec("b", "INT64", (1,))], b"", "this one takes a, b"),
        ([TensorSpec("a", "INT64", ("n", "m", "k"))], b"\0" * 8, "cannot be guessed"),
        ([TensorSpec("a", "INT64", ("n", 2))], b"\0" * 15, "15 bytes for INT64 of shape [0, 2], expected 0"),
        ([TensorSpec("a", "INT64", (2,))], b"\0" * 8, "8 bytes for INT64 of shape [2], expected 16"),
    ],
)
def test_a_bare_tensor_that_has_no_one_meaning_is_refused(inputs: list[TensorSpec], raw: bytes, text: str) -> None:
    status, told = refusal(Head("", "0"), raw, path(*inputs))

    assert status == 400
    assert text in told


@pytest.mark.parametrize(
    ("whole", "outputs", "raw"),
    [
        ({}, None, [False, False]),
        ({"binary_data_output": True}, None, [True, True]),
        (
            {"binary_data_output": True},
            [{"name": "z", "parameters": {"binary_data": False}}, {"name": "y"}],
            [False, True],
        ),
        ({}, [{"name": "z", "parameters": {"binary_data": True}}, {"name": "y"}], [True, False]),
        ({"binary_data_output": False}, [{"name": "y", "parameters": {"binary_data": True}}], [True]),
    ],
)
def test_an_outputs_own_parameter_overrides_the_requests(whole: Any, outputs: Any, raw: list[bool]) -> None:
    row = {"name": "x", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}

    found = asked(*request(row, parameters=whole, outputs=outputs))

    assert [one.raw for one in found.wanted] == raw


@pytest.mark.parametrize(
    "fields",
    [
        {"parameters": {"binary_data_output": 1}},
        {"parameters": {"binary_data_output": "true"}},
        {"outputs": [{"name": "y", "parameters": {"binary_data": "yes"}}]},
    ],
)
def test_a_flag_that_is_neither_true_nor_false_is_refused(fields: Any) -> None:
    row = {"name": "x", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}

    status, text = refusal(*request(row, **fields))

    assert (status, "must be true or false" in text) == (400, True)


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"parameters": {"shared_memory_region": "r"}}, {}),
        ({}, {"parameters": {"sequence_id": 7}}),
        ({}, {"outputs": [{"name": "y", "parameters": {"classification": 3}}]}),
        ({}, {"outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]}),
    ],
)
def test_extensions_that_would_change_the_answer_are_501_and_never_ignored(row: Any, fields: Any) -> None:
    plain = {"name": "x", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}

    assert refusal(*request({**plain, **row}, **fields))[0] == 501


def test_values_that_json_cannot_carry_go_back_raw() -> None:
    array = np.array([[np.nan, np.inf]], np.float32)

    row, back = sent(OUTPUTS[0], array)

    assert (row["shape"], back) == ([1, 2], array.tobytes())


def test_bytes_that_are_no_text_are_an_error_in_json() -> None:
    array = np.empty(1, object)
    array[0] = b"\xff"

    with pytest.raises(Rejected) as caught:
        encode("m", "1", Ask("forward", {}, (Wanted(TensorSpec("o", "BYTES", (1,))),)), {"o": array})

    assert (caught.value.status, str(caught.value)) == (
        500,
        'output o has bytes that are no UTF-8 text; ask for it with the parameter "binary_data": true',
    )


@given(st.binary(max_size=60), st.one_of(st.none(), st.text(max_size=4), st.integers(-2, 70).map(str)))
def test_no_body_and_no_header_is_more_than_the_clients_mistake(body: bytes, told: str | None) -> None:
    assert status(Head("", told), body) in (200, 400, 501)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.integers(-5, 5)
        | st.sampled_from(["x", "INT64", "BYTES", "BF16", "y"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "name",
                        "datatype",
                        "shape",
                        "data",
                        "parameters",
                        "inputs",
                        "outputs",
                        "binary_data_size",
                        "binary_data",
                        "timeout",
                    ]
                ),
                inner,
            )
        ),
        max_leaves=12,
    )
)
def test_no_json_is_more_than_the_clients_mistake(value: Any) -> None:
    for request_value in (value, {"inputs": [value]}, {"inputs": value, "outputs": value, "parameters": value}):
        assert status(Head(), orjson.dumps(request_value)) in (200, 400, 501)
