"""Models of the transformers library, loaded from its own files: what our loader makes is what the library makes."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from app.errors import CheckpointError
from app.weights import LoadedModel
from app.weights.layout import Mode
from app.weights.skeleton import describe
from tests.weights import zoo, zoo_timm
from tests.weights.zoo import CASES, Kind, Recipe, Row, Stored

FACTORY = "tests.weights.zoo:build"
TABLE = Path(__file__).resolve().parents[2] / ".cache/zoo.md"
README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.fixture(scope="session")
def rows() -> Iterator[dict[str, Row]]:
    """The rows of the table that is written when the last of these tests has run."""
    made = {name: Row(case.family) for name, case in CASES.items()}
    yield made
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(zoo.table(made.values()))


# Of the module, not of each test: the library writes and reads once for both modes.
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


def test_files_of_both_kinds_are_sharded_where_they_should_be(stored: Stored) -> None:
    suffix = f"*.{stored.kind}"
    assert (len(list(stored.directory.glob(suffix))) > 1) == stored.sharded
    assert len(list(stored.directory.glob("*.index.json"))) == stored.sharded


def tied_t5(name: str) -> nn.Module:
    """T5 with one tensor for embedding and head, where the files of the case hold two."""
    assert name == "t5_untied"
    return Recipe("T5ForConditionalGeneration", zoo.T5_GATED).construct()


def bare_bert(name: str) -> nn.Module:
    """BERT without a head, where the files of the case have one."""
    assert name == "bert"
    return Recipe("BertModel", zoo.TEXT).construct()


def vit_of_one_name(name: str) -> nn.Module:
    """ViT as the library builds it: it knows nothing of the names in its own files."""
    assert name == "vit"
    return Recipe("ViTForImageClassification", zoo.VISION).construct()


def refused(name: str, factory: str, directory: Path, kind: Kind = "safetensors") -> tuple[str, ...]:
    """Return the problems that our loader finds between a case's files and another factory."""
    CASES[name].save(directory, kind, False)
    with pytest.raises(CheckpointError) as caught:
        zoo.load(f"tests.weights.test_zoo:{factory}", CASES[name], directory, "map")
    return caught.value.problems


def by_kind(problems: tuple[str, ...]) -> dict[str, set[str]]:
    """Return the names of a list of problems by what is wrong with them."""
    found: dict[str, set[str]] = {}
    for problem in problems:
        kind, _, rest = problem.partition(": ")
        found.setdefault(kind, set()).add(rest.split()[0])
    return found


def names(module: nn.Module) -> set[str]:
    return {tensor.name for tensor in describe(module).tensors if tensor.stored}


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_a_model_that_ties_what_its_files_keep_apart_is_refused_with_both_names(kind: Kind, tmp_path: Path) -> None:
    (problem,) = refused("t5_untied", "tied_t5", tmp_path, kind)
    assert problem.startswith(
        "tied: lm_head.weight and shared.weight are one tensor in the model, but stored as differ"
    )


def test_a_model_without_the_head_that_its_file_has_is_refused_with_every_name(tmp_path: Path) -> None:
    found = by_kind(refused("bert", "bare_bert", tmp_path))
    # The file names the second half of each tie once: the library writes the first name only.
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert found == {
        "prefix": {"bert."},
        "missing": names(bare_bert("bert")),
        "unexpected": names(CASES["bert"].build()) - tied,
    }


def test_names_that_the_library_changes_on_its_way_to_the_file_are_refused_until_the_factory_has_them(
    tmp_path: Path,
) -> None:
    found = by_kind(refused("vit", "vit_of_one_name", tmp_path))
    module = vit_of_one_name("vit")
    in_file = set(zoo.own_names(module))
    assert found == {"missing": names(module) - in_file, "unexpected": in_file - names(module)}
    assert len(found["missing"]) == len(found["unexpected"]) > 0


def loaded(tmp_path: Path) -> tuple[LoadedModel, nn.Module]:
    case = CASES["bert"]
    case.save(tmp_path, "safetensors", False)
    return zoo.load(FACTORY, case, tmp_path, "read"), case.reload(tmp_path)


def other_bits(module: nn.Module) -> None:
    with torch.no_grad():
        module.get_parameter("bert.embeddings.LayerNorm.bias").neg_()


def other_tie(module: nn.Module) -> None:
    head = module.get_submodule("cls.predictions.decoder")
    head.bias = nn.Parameter(module.get_parameter("cls.predictions.bias").detach().clone())


def other_buffer(module: nn.Module) -> None:
    embeddings = module.get_submodule("bert.embeddings")
    embeddings.register_buffer("position_ids", module.get_buffer("bert.embeddings.position_ids"), persistent=True)


def other_type(module: nn.Module) -> None:
    module.get_submodule("bert.embeddings").position_ids = module.get_buffer("bert.embeddings.position_ids").int()


def no_buffer(module: nn.Module) -> None:
    del module.get_submodule("bert.embeddings").position_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_bits, "bert.embeddings.LayerNorm.bias has other bits"),
        (
            other_tie,
            "ties differ: [['cls.predictions.bias'], ['cls.predictions.bias', 'cls.predictions.decoder.bias'], "
            "['cls.predictions.decoder.bias']]",
        ),
        (other_buffer, "bert.embeddings.position_ids is stored in one module only"),
        (
            other_type,
            "bert.embeddings.position_ids is (torch.int64, (1, 16), (16, 1)), not (torch.int32, (1, 16), (16, 1))",
        ),
        (no_buffer, "bert.embeddings.position_ids is not the library's"),
        (partial(nn.Module.add_module, name="more", module=nn.Linear(1, 1)), "more.weight is missing"),
    ],
    ids=["bits", "tie", "persistence", "dtype", "fewer", "more"],
)
def test_the_comparison_sees_differences(change: Callable[[nn.Module], None], message: str, tmp_path: Path) -> None:
    ours, theirs = loaded(tmp_path)
    assert ours.module is not None
    assert zoo.differences(ours.module, theirs) == []
    change(theirs)
    assert message in zoo.differences(ours.module, theirs)


def test_the_table_tells_what_passed_from_what_failed_and_from_what_was_not_run() -> None:
    row = Row("BERT", "BertModel", 7, 1, 2)
    row.begin(*(("safetensors", sharded, mode) for sharded in (False, True) for mode in zoo.MODES))
    for mode in zoo.MODES:
        row.weights["safetensors", False, mode] = row.outputs["safetensors", False, mode] = True
    row.weights["safetensors", True, "map"] = True
    header, rule, line = zoo.table([row]).splitlines()
    assert header.split(" | ")[0] == "| model"
    assert set(rule) == set("| -")
    assert line == "| BERT | `BertModel` | 7 | 1 | 2 | yes | failed | not run | not run | failed | failed |"
    assert len(set(zoo.row_names())) == len(CASES)


def test_the_readme_quotes_what_this_run_has_found(rows: dict[str, Row]) -> None:
    quoted = README.read_text().partition("<!-- zoo -->")[2].partition("<!-- /zoo -->")[0].splitlines()
    titles = {line.split(" | ")[0].removeprefix("| ") for line in quoted}
    assert titles >= {*zoo.row_names(), *zoo.row_names(zoo_timm.CASES)}
    found = [line for line in zoo.table(rows.values()).splitlines() if "not run" not in line]
    assert [line for line in found if line not in quoted] == []
