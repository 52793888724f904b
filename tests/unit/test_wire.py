"""Tensors of the Open Inference Protocol as JSON: exact, or refused in words that name the input."""

from typing import Any

import numpy as np
import orjson
import pytest

from app.http.wire import Ask, Head, Wanted, decode, encode
from app.paths import ModelPath
from app.servable import DATATYPES, Array, Rejected, TensorSpec

INPUTS = (TensorSpec("x", "INT64", ("batch", 2)),)
OUTPUTS = (TensorSpec("y", "FP32", ("batch", 2)), TensorSpec("z", "INT64", ("batch",)))
PATHS = (ModelPath("forward", INPUTS, OUTPUTS, (), ()),)
KNOWN = "BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FP16, FP32, FP64, BF16, BYTES"
LIMIT = 10_000
PLAIN = Head()


def row(**changes: Any) -> dict[str, Any]:
    full = {"name": "x", "datatype": "INT64", "shape": [1, 2], "data": [1, 2], **changes}
    return {name: value for name, value in full.items() if value is not ...}


def ask(*rows: dict[str, Any], **fields: Any) -> Ask:
    return decode(PLAIN, orjson.dumps({"inputs": list(rows) or [row()], **fields}), PATHS, LIMIT)


def refusal(body: bytes, head: Head = PLAIN, paths: Any = PATHS) -> tuple[int, str]:
    with pytest.raises(Rejected) as caught:
        decode(head, body, paths, LIMIT)
    assert caught.value.reason is None
    return caught.value.status, str(caught.value)


def described(array: Array) -> tuple[str, tuple[int, ...], Any]:
    return array.dtype.name, array.shape, array.tolist()


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([2, 2], [1, 2, 3, 4]),
        ([2, 2], [[1, 2], [3, 4]]),
    ],
)
def test_flat_and_nested_data_are_the_same_tensor(shape: list[int], data: Any) -> None:
    assert described(ask(row(shape=shape, data=data)).arrays["x"]) == ("int64", (2, 2), [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("BOOL", [True, False]),
        ("UINT8", [0, 2**8 - 1]),
        ("UINT16", [0, 2**16 - 1]),
        ("UINT32", [0, 2**32 - 1]),
        ("UINT64", [0, 2**64 - 1]),
        ("UINT64", [2**64 - 1, 2**64 - 2]),
        ("UINT64", [2**53 + 1, 2**63]),
        ("INT8", [-(2**7), 2**7 - 1]),
        ("INT16", [-(2**15), 2**15 - 1]),
        ("INT32", [-(2**31), 2**31 - 1]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("INT64", [2**53 + 1, -(2**53) - 1]),
        ("FP16", [-65504.0, 65504.0]),
        ("FP32", [-3.4028234663852886e38, 3.4028234663852886e38]),
        ("FP64", [-1.7976931348623157e308, 5e-324]),
        ("BF16", [-3.3895313892515355e38, 1.5]),
    ],
)
def test_every_datatype_keeps_its_extreme_values_exactly_in_both_directions(datatype: str, data: list[Any]) -> None:
    decoded = ask(row(datatype=datatype, data=data)).arrays["x"]
    spec = TensorSpec("out", datatype, (1, 2))
    body = encode("m", "1", Ask("forward", {}, (Wanted(spec),)), {"out": decoded}).body
    sent = orjson.loads(body)["outputs"][0]

    assert described(decoded) == (DATATYPES[datatype], (1, 2), [data])
    assert (sent["datatype"], sent["shape"]) == (datatype, [1, 2])
    assert np.array(sent["data"], DATATYPES[datatype]).tolist() == data


@pytest.mark.parametrize(
    ("datatype", "data", "values"),
    [
        ("BOOL", [0, 1], [False, True]),
        ("FP32", [1, 2.5], [1.0, 2.5]),
        ("FP64", [2**53, 1], [float(2**53), 1.0]),
        ("FP32", [0.1, 1e-50], [np.float32(0.1), 0.0]),
    ],
)
def test_numbers_of_another_kind_are_taken_where_the_datatype_holds_them(
    datatype: str, data: list[Any], values: list[Any]
) -> None:
    assert ask(row(datatype=datatype, data=data)).arrays["x"].tolist() == [values]


def test_a_scalar_has_the_empty_shape() -> None:
    assert described(ask(row(shape=[], data=5)).arrays["x"]) == ("int64", (), 5)


@pytest.mark.parametrize("data", [[], [[]]])
def test_an_empty_batch_keeps_its_shape_and_datatype(data: list[Any]) -> None:
    assert described(ask(row(shape=[0, 2], data=data)).arrays["x"]) == ("int64", (0, 2), [])


REFUSED_ROWS: list[tuple[dict[str, Any], str]] = [
    (row(data=[1.5, 2]), "input x: data is not int64"),
    (row(data=[1.0, 2.0]), "input x: data is not int64"),
    (row(data=[True, False]), "input x: data is not int64"),
    (row(data=["1", "2"]), "input x: data is not int64"),
    (row(data=[1, None]), "input x: data is not int64"),
    (row(data=None), "input x: data is missing; give one of data and binary_data_size"),
    (row(data={}), "input x: data is not int64"),
    (row(datatype="FP32", data=["a", "b"]), "input x: data is not float32"),
    (row(datatype="FP32", data=[1, None]), "input x: data is not float32"),
    (row(datatype="BOOL", data=[0.0, 1.0]), "input x: data is not bool"),
    (row(datatype="BOOL", data=[0, 2]), "input x: values from 0 to 2 do not fit bool"),
    (row(datatype="UINT8", data=[300, 1]), "input x: values from 1 to 300 do not fit uint8"),
    (row(datatype="UINT8", data=[-1, 1]), "input x: values from -1 to 1 do not fit uint8"),
    (row(datatype="INT8", data=[-129, 0]), "input x: values from -129 to 0 do not fit int8"),
    (row(datatype="INT32", data=[2**31, 0]), "input x: values from 0 to 2147483648 do not fit int32"),
    (row(data=[2**63, 2**63]), f"input x: values from {2**63} to {2**63} do not fit int64"),
    (row(data=[[1, 2], [3]]), "input x: data is ragged or not numbers"),
    (row(data=[[1], 2]), "input x: data is ragged or not numbers"),
    (row(data=[1, 2, 3]), "input x: 3 values for shape [1, 2], expected 2"),
    (row(data=[]), "input x: 0 values for shape [1, 2], expected 2"),
    (row(shape=[0, 2]), "input x: 2 values for shape [0, 2], expected 0"),
    (row(datatype="INT65"), f"input x: datatype 'INT65' is unknown; known are {KNOWN}"),
    (row(datatype="int64"), f"input x: datatype 'int64' is unknown; known are {KNOWN}"),
    (row(datatype="BYTES", data=["a", 1]), "input x: data is ragged or not texts"),
    (row(datatype="BYTES", shape=[2, 2], data=[["a"], ["b", "c", "d"]]), "input x: data is ragged or not texts"),
    (row(datatype="BYTES", data=["a"]), "input x: 1 values for shape [1, 2], expected 2"),
    (row(datatype=...), f"input x: datatype None is unknown; known are {KNOWN}"),
    (row(datatype=["INT64"]), f"input x: datatype ['INT64'] is unknown; known are {KNOWN}"),
    (row(shape=...), "input x: shape must be a list of whole numbers, got None"),
    (row(shape="12"), "input x: shape must be a list of whole numbers, got '12'"),
    (row(shape=[-1, 2]), "input x: shape must be a list of whole numbers, got [-1, 2]"),
    (row(shape=[1.5, 2]), "input x: shape must be a list of whole numbers, got [1.5, 2]"),
    (row(shape=[True, 2]), "input x: shape must be a list of whole numbers, got [True, 2]"),
    (row(data=...), "input x: data is missing; give one of data and binary_data_size"),
    (row(name=...), "every input must be an object with a name"),
    (row(name=5), "every input must be an object with a name"),
]


@pytest.mark.parametrize(("one", "text"), REFUSED_ROWS)
def test_an_input_that_is_not_what_it_says_is_refused_by_name(one: dict[str, Any], text: str) -> None:
    assert refusal(orjson.dumps({"inputs": [one]})) == (400, text)


@pytest.mark.parametrize(
    ("datatype", "data"), [("UINT64", [2**64 - 1, -1]), ("INT64", [2**63, 0]), ("INT64", [2**63, -1])]
)
def test_whole_numbers_beyond_the_datatype_are_refused_however_they_are_mixed(datatype: str, data: list[int]) -> None:
    status, text = refusal(orjson.dumps({"inputs": [row(datatype=datatype, data=data)]}))

    assert (status, text.partition(": ")[0]) == (400, "input x")


@pytest.mark.parametrize(("datatype", "data"), [("FP16", [70000.0, 1.0]), ("FP32", [1e39, 1.0])])
def test_a_number_that_would_become_infinite_is_refused(datatype: str, data: list[float]) -> None:
    status, text = refusal(orjson.dumps({"inputs": [row(datatype=datatype, data=data)]}))

    assert (status, text.partition(": ")[0]) == (400, "input x")


@pytest.mark.parametrize("parameters", [5, True, 0, False, "", []])
def test_parameters_that_are_no_object_are_the_clients_mistake(parameters: Any) -> None:
    assert refusal(orjson.dumps({"inputs": [row(parameters=parameters)]}))[0] == 400


@pytest.mark.parametrize(
    ("timeout", "seconds"), [(None, None), (0, None), (250_000, 0.25), (3e7, 30.0), (1, 1e-6), (0.0, None)]
)
def test_the_timeout_is_whole_microseconds_however_they_are_written(timeout: Any, seconds: float | None) -> None:
    assert ask(parameters={"timeout": timeout}).timeout_s == seconds


@pytest.mark.parametrize("timeout", [-1, 0.5, "1", True, [], 1e-300])
def test_a_timeout_that_is_no_number_of_microseconds_is_refused(timeout: Any) -> None:
    body = orjson.dumps({"inputs": [row()], "parameters": {"timeout": timeout}})

    assert refusal(body) == (400, f"the parameter timeout must be whole microseconds, got {timeout!r}")


def test_a_shape_too_large_for_any_array_is_the_clients_mistake() -> None:
    assert refusal(orjson.dumps({"inputs": [row(shape=[0, 2**62, 2], data=[])]}))[0] == 400


def test_an_input_given_twice_is_refused() -> None:
    assert refusal(orjson.dumps({"inputs": [row(), row()]})) == (400, "input x is given twice")


BODY_TEXT = 'the body must be an object with "inputs": [{"name", "shape", "datatype", "data"}, …]'


@pytest.mark.parametrize("body", [b"[]", b"5", b"{}", b'{"inputs": {}}', b'{"inputs": null}'])
def test_a_body_without_a_list_of_inputs_is_refused(body: bytes) -> None:
    assert refusal(body) == (400, BODY_TEXT)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'{"inputs": [NaN]}', b"[" * 2000], ids=["empty", "open", "latin", "nan", "deep"]
)
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    status, text = refusal(body)

    assert (status, text.startswith("the body is not JSON: ")) == (400, True)


@pytest.mark.parametrize("one", [5, "x", None, []])
def test_an_input_that_is_no_object_is_refused(one: Any) -> None:
    assert refusal(orjson.dumps({"inputs": [one]})) == (400, "every input must be an object with a name")


@pytest.mark.parametrize(
    ("fields", "identifier"), [({"id": "a-1"}, "a-1"), ({"id": ""}, ""), ({"id": None}, None), ({}, None)]
)
def test_the_id_is_echoed_exactly_when_there_is_one(fields: dict[str, Any], identifier: str | None) -> None:
    asked = ask(**fields)
    answer = orjson.loads(encode("m", "1", Ask(asked.path, asked.arrays, (), asked.id), {}).body)

    assert (asked.id, answer.get("id"), "id" in answer) == (identifier, identifier, identifier is not None)


@pytest.mark.parametrize("identifier", [5, 1.5, ["a"], {}])
def test_an_id_that_is_no_string_is_refused(identifier: Any) -> None:
    assert refusal(orjson.dumps({"inputs": [row()], "id": identifier})) == (400, '"id" must be a string')


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (None, ["y", "z"]),
        ([], ["y", "z"]),
        ([{"name": "z"}], ["z"]),
        ([{"name": "z"}, {"name": "y"}], ["z", "y"]),
        ([{"name": "y", "parameters": {"binary_data": False}}], ["y"]),
    ],
)
def test_the_outputs_that_are_asked_for_come_in_that_order(outputs: Any, names: list[str]) -> None:
    assert [(one.spec.name, one.raw) for one in ask(outputs=outputs).wanted] == [(name, False) for name in names]


@pytest.mark.parametrize(
    ("outputs", "name"),
    [([{"name": "q"}], "'q'"), ([{"name": "y"}, {"name": "q"}], "'q'"), ([{}], "None"), (["y"], "None")]
    + [(one, "None") for one in (5, 0, False, "", {})],
)
def test_an_unknown_output_is_refused_with_the_known_ones(outputs: Any, name: str) -> None:
    body = orjson.dumps({"inputs": [row()], "outputs": outputs})

    assert refusal(body) == (400, f"unknown output {name}; the model gives y, z")


@pytest.mark.parametrize("name", [["y"], {"y": 1}])
def test_an_output_whose_name_is_no_string_is_the_clients_mistake(name: Any) -> None:
    assert refusal(orjson.dumps({"inputs": [row()], "outputs": [{"name": name}]}))[0] == 400


def test_the_answer_holds_model_version_id_and_flat_outputs() -> None:
    outputs = {"y": np.array([[1, 2], [3, 4]], np.float32), "z": np.array([7, 8])}

    body = encode("tiny", "3", ask(id="a"), outputs).body

    assert orjson.loads(body) == {
        "model_name": "tiny",
        "model_version": "3",
        "id": "a",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [2, 2], "data": [1.0, 2.0, 3.0, 4.0]},
            {"name": "z", "datatype": "INT64", "shape": [2], "data": [7, 8]},
        ],
    }


def test_an_output_that_is_not_contiguous_is_sent_row_by_row() -> None:
    transposed = np.arange(4, dtype=np.float32).reshape(2, 2).T

    body = encode("m", "1", Ask("forward", {}, (Wanted(OUTPUTS[0]),)), {"y": transposed}).body

    assert orjson.loads(body)["outputs"][0]["data"] == [0.0, 2.0, 1.0, 3.0]


def test_a_shape_may_be_written_as_some_languages_write_whole_numbers() -> None:
    assert described(ask(row(shape=[1.0, 2.0])).arrays["x"]) == ("int64", (1, 2), [[1, 2]])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_output_that_is_not_finite_is_an_error_and_never_null(value: float) -> None:
    outputs = {"y": np.array([[1.0, value]], np.float32)}

    with pytest.raises(Rejected) as caught:
        encode("m", "1", Ask("forward", {}, (Wanted(OUTPUTS[0]),)), outputs)

    assert (caught.value.status, str(caught.value)) == (
        500,
        "output y has values that are not finite, which JSON cannot carry; ask for it with the parameter "
        '"binary_data": true',
    )
