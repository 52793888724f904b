"""The codec's threads: bounded, within the request's time, and out of the way of plain tensors."""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from app.buckets import FORWARD
from app.codecs import as_array, chosen, declared
from app.errors import SettingsError
from app.lanes import Crew
from app.paths import ModelPath
from app.servable import Question, Rejected, TensorSpec
from app.serving.coding import Coding
from app.settings import Serving
from tests.unit.test_executor import INPUTS, OUTPUTS, Doubling, executor, rows

PATH = ModelPath(FORWARD, INPUTS, OUTPUTS, (), ())
TEXT = {"name": "text", "datatype": "BYTES", "shape": ["batch"]}


class Codec:
    """Takes the length of each text, once it may."""

    inputs: Sequence[Mapping[str, Any]] = (TEXT,)

    def __init__(self, opened: threading.Event | None = None) -> None:
        self.opened, self.threads, self.calls = opened, set[str](), 0

    def encode(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        if self.opened:
            self.opened.wait(30)
        return {"x": np.array([[len(text)] * 3 for text in inputs["text"]], np.float32)}

    def samples(self) -> Sequence[Any]:
        return []


def coding(codec: Codec, threads: int = 1, **limits: Any) -> Coding:
    inner, _ = executor(Doubling(), **limits)
    loaded = declared(codec, "test:Codec", PATH)
    assert loaded.raw
    return Coding(inner, loaded, loaded.raw, Crew(threads, "codec"), Serving(**limits), time.monotonic)


def texts(*given: str) -> Any:
    return {"text": as_array(given, TensorSpec("text", "BYTES", ("batch",)))}


def test_texts_are_coded_in_the_codecs_threads_and_tensors_pass() -> None:
    codec = Codec()
    made = coding(codec)

    async def scenario() -> Any:
        one = await made.answer(Question(FORWARD, texts("abc", "ü")))
        two = await made.answer(Question(FORWARD, rows(2)))
        return one, two

    coded, plain = asyncio.run(scenario())

    assert coded.outputs["y"].tolist() == [[6.0] * 3, [4.0] * 3]
    assert (coded.codec_s > 0, plain.codec_s, codec.calls) == (True, 0.0, 1)
    assert all(name.startswith("codec") for name in codec.threads)


def test_more_than_may_wait_are_refused_while_the_codec_is_busy() -> None:
    opened = threading.Event()
    made = coding(Codec(opened), max_queue_items=3)

    async def scenario() -> list[Any]:
        asking = [asyncio.ensure_future(made.answer(Question(FORWARD, texts("a")))) for _ in range(5)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        opened.set()
        return await asyncio.gather(*asking, return_exceptions=True)

    found = asyncio.run(scenario())

    refused = [one for one in found if isinstance(one, Rejected)]
    assert [(one.status, one.reason) for one in refused] == [(503, "queue_full")] * 2
    assert made.inside == 0


def test_a_request_whose_time_passes_before_its_turn_is_never_coded() -> None:
    opened = threading.Event()
    codec = Codec(opened)
    made = coding(codec)

    async def scenario() -> list[Any]:
        first = asyncio.ensure_future(made.answer(Question(FORWARD, texts("a"))))
        late = asyncio.ensure_future(made.answer(Question(FORWARD, texts("b"), timeout_s=0.05)))
        await asyncio.sleep(0.1)
        opened.set()
        return await asyncio.gather(first, late, return_exceptions=True)

    answer, late = asyncio.run(scenario())

    assert answer.outputs["y"].tolist() == [[2.0] * 3]
    assert (late.status, late.reason, str(late)) == (504, "deadline", "not started within 0.05 s")
    assert codec.calls == 1


def test_time_that_the_codec_took_is_no_longer_there_to_wait_for_the_device() -> None:
    opened = threading.Event()
    made = coding(Codec(opened))

    async def scenario() -> Any:
        asking = asyncio.ensure_future(made.answer(Question(FORWARD, texts("a"), timeout_s=0.05)))
        await asyncio.sleep(0.1)
        opened.set()
        return await asyncio.gather(asking, return_exceptions=True)

    (late,) = asyncio.run(scenario())

    assert (late.status, late.reason) == (504, "deadline")


@pytest.mark.parametrize(
    ("given", "raw"),
    [({"text"}, True), ({"x"}, False), ({"x", "text"}, False), (set(), False), ({"other"}, False)],
)
def test_the_names_of_the_inputs_say_which_form_a_request_has(given: set[str], raw: bool) -> None:
    form = declared(Codec(), "test:Codec", PATH).raw

    assert (chosen(PATH, form, given) is form) == raw
    assert chosen(PATH, None, given) is PATH


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"inputs": []}, "model.codec c: inputs are empty"),
        ({"inputs": 5}, "model.codec c: inputs = 5: rows of name, shape and datatype"),
        ({"inputs": [{"name": "text"}]}, "model.codec c: inputs = [{'name': 'text'}]: rows of name, shape and "),
        ({"inputs": [{**TEXT, "datatype": "STRING"}]}, "model.codec c: inputs = "),
        ({"inputs": [{**TEXT, "shape": "batch"}]}, "model.codec c: inputs = "),
        ({"inputs": [{**TEXT, "name": "x"}]}, "model.codec c: inputs x are the model's own; choose others"),
        ({"outputs": [TEXT]}, "model.codec c lacks decode"),
        ({"decode": lambda outputs: outputs}, "model.codec c lacks outputs"),
        ({"encode": None}, "model.codec c lacks encode"),
    ],
)
def test_a_codec_that_declares_what_cannot_be_is_refused_by_name(change: dict[str, Any], text: str) -> None:
    codec = Codec()
    for name, value in change.items():
        setattr(codec, name, value)

    with pytest.raises(SettingsError) as caught:
        declared(codec, "c", PATH)

    assert str(caught.value).startswith(text)
