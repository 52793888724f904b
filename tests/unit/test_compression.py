"""Compressed bodies: both codings both ways, never more than the limit, and never where nobody asked for it."""

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.http.compression import coding_asked, deflate, inflate
from app.servable import Rejected

BOMB = gzip.compress(bytes(50_000_000))


def refusal(body: bytes, coding: str, limit: int = 1000) -> tuple[int, str, str | None]:
    with pytest.raises(Rejected) as caught:
        inflate(body, coding, limit)
    return caught.value.status, str(caught.value), caught.value.reason


@given(st.binary(max_size=1000), st.sampled_from(["gzip", "deflate"]))
def test_what_is_deflated_inflates_to_itself(body: bytes, coding: str) -> None:
    assert inflate(deflate(body, coding), coding, 1000) == body


@pytest.mark.parametrize(("coding", "body"), [("GZIP", gzip.compress(b"a")), ("x-gzip", gzip.compress(b"a"))])
def test_names_of_codings_have_no_case_and_an_old_form(coding: str, body: bytes) -> None:
    assert inflate(body, coding, 10) == b"a"


@pytest.mark.parametrize("coding", ["identity", " ", "Identity"])
def test_an_identity_is_as_it_is(coding: str) -> None:
    assert inflate(b"abc", coding, 10) == b"abc"


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "none"])
def test_another_coding_is_415_and_names_those_that_are_known(coding: str) -> None:
    assert refusal(b"", coding) == (415, f"Content-Encoding {coding!r} is unknown; known are gzip and deflate", None)


def test_a_bomb_is_refused_at_the_limit_without_being_inflated() -> None:
    told = "the inflated body is larger than serving.max_body_bytes = 1000"

    assert refusal(BOMB, "gzip") == (413, told, "too_large")


def test_a_body_of_exactly_the_limit_is_taken() -> None:
    assert inflate(gzip.compress(bytes(1000)), "gzip", 1000) == bytes(1000)
    assert refusal(gzip.compress(bytes(1001)), "gzip")[0] == 413


@pytest.mark.parametrize(
    ("body", "coding", "text"),
    [
        (b"plain", "gzip", "the body is not gzip: "),
        (b"plain", "deflate", "the body is not deflate: "),
        (gzip.compress(b"a" * 500)[:-9], "gzip", "the gzip body is cut off"),
        (zlib.compress(b"a") + b"more", "deflate", "the deflate body goes on after its end"),
        (b"", "gzip", "the gzip body is cut off"),
        (gzip.compress(b"abc")[:-8] + bytes(8), "gzip", "the body is not gzip: "),
    ],
)
def test_a_body_that_is_not_what_its_header_says_is_the_clients_mistake(body: bytes, coding: str, text: str) -> None:
    status, told, reason = refusal(body, coding)

    assert (status, told[: len(text)], reason) == (400, text, None)


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("GZip;q=0.5", "gzip"),
        ("gzip, br;q=0", "gzip"),
        ("gzip, deflate, br", None),
        ("gzip, deflate", None),
        ("br", None),
        ("gzip;q=0", None),
        ("gzip;q=0.0", None),
        ("*", None),
        ("identity", None),
        ("", None),
    ],
)
def test_an_answer_is_compressed_where_exactly_one_coding_is_asked_for(accepted: str, coding: str | None) -> None:
    assert coding_asked(accepted) == coding
