"""Models of the timm library, loaded from its own files; `make zoo-timm` runs this where timm is installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.weights.layout import Mode
from tests.weights import zoo
from tests.weights.zoo import Row, Stored
from tests.weights.zoo_timm import CASES

FACTORY = "tests.weights.zoo_timm:build"
TABLE = Path(__file__).resolve().parents[2] / ".cache/zoo_timm.md"


@pytest.fixture(scope="session")
def rows() -> Iterator[dict[str, Row]]:
    """The rows of the table that is written when the last of these tests has run."""
    made = {name: Row(case.family) for name, case in CASES.items()}
    yield made
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(zoo.table(made.values()))


@pytest.fixture(
    scope="module",
    params=[(name, kind, sharded) for name in CASES for kind in zoo.KINDS for sharded in (False, True)],
    ids=lambda one: f"{one[0]}-{one[1]}-{'shards' if one[2] else 'one'}",
)
def stored(request: pytest.FixtureRequest, rows: dict[str, Row], tmp_path_factory: pytest.TempPathFactory) -> Stored:
    name, kind, sharded = request.param
    return zoo.store(CASES[name], kind, sharded, tmp_path_factory.mktemp(name), rows[name])


@pytest.mark.parametrize("mode", zoo.MODES)
def test_a_model_of_the_library_is_loaded_bit_for_bit(stored: Stored, mode: Mode, rows: dict[str, Row]) -> None:
    assert zoo.prove(FACTORY, stored, mode, rows[stored.case.name]) == []
