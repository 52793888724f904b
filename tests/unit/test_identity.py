"""An artifact may be reused exactly when the keys are equal; a difference is told in words."""

import hashlib
from typing import Any

import pytest

from app.identity import ArtifactIdentity

FIELDS: dict[str, Any] = {
    "torch": "2.13.0",
    "device": {"kind": "cpu", "threads": 2, "cache": {"l2": 1024}},
    "buckets": ["batch=1", "batch=8"],
    "config": None,
    "dynamic": True,
}


def changed(path: str, value: Any) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    return {**FIELDS, name: {**FIELDS[name], rest: value} if rest else value}


def test_the_key_is_the_sha256_of_the_fields_as_canonical_json() -> None:
    canonical = b'{"a":["\\u00e4",1],"b":{"c":null}}'

    assert ArtifactIdentity({"b": {"c": None}, "a": ["ä", 1]}).key() == hashlib.sha256(canonical).hexdigest()


def test_the_order_of_fields_does_not_matter() -> None:
    turned = {name: FIELDS[name] for name in reversed(FIELDS)}
    turned["device"] = {name: FIELDS["device"][name] for name in reversed(FIELDS["device"])}

    assert ArtifactIdentity(turned).key() == ArtifactIdentity(FIELDS).key()
    assert ArtifactIdentity(turned).differences(ArtifactIdentity(FIELDS)) == ()


def test_the_digest_says_how_it_was_made() -> None:
    identity = ArtifactIdentity(FIELDS)

    assert identity.digest == f"sha256:{identity.key()}"


@pytest.mark.parametrize(
    ("path", "value", "difference"),
    [
        ("torch", "2.14.1", "torch 2.13.0 → 2.14.1"),
        ("device", {}, "device kind cpu → nothing"),
        ("device.kind", "cuda", "device kind cpu → cuda"),
        ("device.threads", 4, "threads 2 → 4"),
        ("device.cache", {"l2": 2048}, "device cache l2 1024 → 2048"),
        ("device.name", "N1", "device name nothing → N1"),
        ("buckets", ["batch=8", "batch=1"], "buckets batch=1, batch=8 → batch=8, batch=1"),
        ("buckets", ["batch=1", "batch=16"], "buckets batch=8 → batch=16"),
        ("buckets", "any", "buckets batch=1, batch=8 → any"),
        ("config", "0a1b", "config null → 0a1b"),
        ("dynamic", False, "dynamic true → false"),
        ("added", "x", "added nothing → x"),
        ("torch", "2.13.0\n", "torch 2.13.0 → 2.13.0\\n"),
    ],
)
def test_every_changed_field_gives_another_key_and_is_told(path: str, value: Any, difference: str) -> None:
    before, after = ArtifactIdentity(FIELDS), ArtifactIdentity(changed(path, value))

    assert after.key() != before.key()
    assert before.differences(after)[0] == difference


ONE, TWO = "1" * 64, "2" * 64


@pytest.mark.parametrize(
    ("stored", "wanted", "told"),
    [
        ({"torch_code": ONE}, {"torch_code": TWO}, ["torch's own code changed"]),
        ({"model": {"config": None}}, {"model": {"config": ONE}}, ["config.json is new"]),
        ({"model": {"config": ONE}}, {"model": {"config": None}}, ["config.json is gone"]),
        (
            {"model": {"sources": {"own.model": ONE, "numpy": "numpy 2.1"}}},
            {"model": {"sources": {"own.model": TWO, "numpy": "numpy 2.2", "own.more": ONE}}},
            ["model source own.model changed", "package numpy 2.1 → 2.2", "model source own.more is new"],
        ),
        ({"model": {"kwargs": {}}}, {"model": {"kwargs": {"width": 3}}}, ["argument width nothing → 3"]),
        (
            {"model": {"kwargs": {"a": {"b": 1}}}},
            {"model": {"kwargs": {"a": {"b": 2}}}},
            ["argument a.b 1 → 2"],
        ),
        (
            {"device": {"features": "avx avx2 sse"}},
            {"device": {"features": "amx avx sse"}},
            ["the processor lacks avx2 and has amx"],
        ),
        (
            {"inputs": ["x FP32['batch', 3]", "y FP32[1]"]},
            {"inputs": ["x FP32['batch', 4]", "y FP32[1]"]},
            ["inputs x FP32['batch', 3] → x FP32['batch', 4]"],
        ),
        ({"numerics": {"mkldnn": "True"}}, {"numerics": {"mkldnn": "False"}}, ["numerics mkldnn True → False"]),
        (
            {"tensors": {"encoder.weight": "F32[3,4]"}},
            {"tensors": {"encoder.weight": "F32[3,5]"}},
            ["tensor encoder.weight F32[3,4] → F32[3,5]"],
        ),
        (
            {"tensors": {f"t{n}": "F32[1]" for n in range(6)}},
            {"tensors": {f"t{n}": "F32[2]" for n in range(6)}},
            [*(f"tensor t{n} F32[1] → F32[2]" for n in range(3)), "3 more tensors differ"],
        ),
        (
            {"tensors": {"old": "F32[1]"}},
            {"tensors": {f"t{n}": "F32[1]" for n in range(12)}},
            ["12 tensors more: t0, t1, t2, …", "1 tensor fewer: old"],
        ),
        ({"tensors": {}}, {"tensors": {"t": "F32[1]"}}, ["1 tensor more: t"]),
        ({"tensors": ONE}, {"tensors": {}}, ["tensors " + "1" * 40 + "…3138bb9b → {}"]),
    ],
)
def test_differences_are_told_in_words(stored: dict[str, Any], wanted: dict[str, Any], told: list[str]) -> None:
    assert list(ArtifactIdentity(stored).differences(ArtifactIdentity(wanted))) == told


def test_very_many_differences_are_told_by_their_number() -> None:
    many = ArtifactIdentity({f"f{number}": number for number in range(100)})

    told = many.differences(ArtifactIdentity({}))

    assert (len(told), told[-1]) == (41, "60 more")


def test_a_field_that_is_gone_is_told_as_nothing() -> None:
    less = ArtifactIdentity({name: value for name, value in FIELDS.items() if name != "torch"})

    assert ArtifactIdentity(FIELDS).differences(less) == ("torch 2.13.0 → nothing",)


def test_all_differences_come_in_the_order_of_the_fields() -> None:
    other = ArtifactIdentity({**FIELDS, "dynamic": False, "torch": "2.14.1", "extra": 1})

    assert ArtifactIdentity(FIELDS).differences(other) == (
        "torch 2.13.0 → 2.14.1",
        "dynamic true → false",
        "extra nothing → 1",
    )


def test_long_values_are_cut_and_told_apart_by_their_digest() -> None:
    one, two = "f" * 61, "f" * 60 + "g"
    told = ArtifactIdentity({"flags": one}).differences(ArtifactIdentity({"flags": two}))
    digests = [hashlib.sha256(text.encode()).hexdigest()[:8] for text in (one, two)]

    assert told == (f"flags {'f' * 40}…{digests[0]} → {'f' * 40}…{digests[1]}",)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"kwargs": {"layers": 1}}, {"kwargs": {"layers": True}}),
        ({"kwargs": {"layers": 1}}, {"kwargs": {"layers": 1.0}}),
        ({"config": None}, {}),
        ({"kwargs": {}}, {}),
    ],
    ids=["one and true", "one and 1.0", "null and absent", "empty and absent"],
)
def test_identities_with_different_keys_always_tell_a_difference(one: dict[str, Any], two: dict[str, Any]) -> None:
    before, after = ArtifactIdentity(one), ArtifactIdentity(two)

    assert before.key() != after.key()
    assert before.differences(after) != ()
