"""What the model's code is: local files by content, installed packages by version, and nothing is imported."""

import hashlib
import importlib.metadata
import sys
from pathlib import Path

import pytest

from app.artifacts.sources import describe_sources
from app.errors import SettingsError

# file → content; the module's body raises, so importing it would be noticed.
FILES = {
    "own_model/__init__.py": "",
    "own_model/build.py": (
        "import os\nimport json.decoder\nimport numpy as np\nimport own_plain\n"
        "from . import near\nfrom .deep.layer import Layer\nfrom own_model.absolute import thing\n"
        "import absent_optional\n\n"
        "def build():\n    from own_model import inside\n    return inside\n\n"
        "raise RuntimeError('this was imported')\n"
    ),
    "own_model/near.py": "from .second import x\n",
    "own_model/second.py": "x = 1\n",
    "own_model/absolute.py": "thing = 1\n",
    "own_model/inside.py": "value = 1\n",
    "own_model/unused.py": "value = 1\n",
    "own_model/deep/__init__.py": "",
    "own_model/deep/layer.py": "from .. import upward\nclass Layer: ...\n",
    "own_model/upward.py": "value = 1\n",
    "own_plain.py": "value = 1\n",
}
FACTORY = "own_model.build:build"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "file",
    [
        "own_model/build.py",
        "own_model/near.py",
        "own_model/second.py",
        "own_model/absolute.py",
        "own_model/inside.py",
        "own_model/deep/layer.py",
        "own_model/upward.py",
        "own_plain.py",
    ],
)
def test_a_change_in_any_module_that_the_factory_reaches_changes_the_description(root: Path, file: str) -> None:
    before = describe_sources(FACTORY)

    (root / file).write_text(FILES[file] + "# changed\n")

    assert describe_sources(FACTORY) != before


@pytest.mark.parametrize("file", ["own_model/__init__.py", "own_model/deep/__init__.py"])
def test_a_change_in_a_package_that_holds_a_reached_module_changes_the_description(root: Path, file: str) -> None:
    before = describe_sources(FACTORY)

    (root / file).write_text("# changed\n")

    assert describe_sources(FACTORY) != before


def test_the_package_around_the_factory_counts_though_nothing_names_it(root: Path) -> None:
    (root / "own_model" / "build.py").write_text("")
    before = describe_sources(FACTORY)

    (root / "own_model" / "__init__.py").write_text("# changed\n")

    assert describe_sources(FACTORY) != before


@pytest.mark.parametrize(
    "order", ["from .one import a\nfrom .two import b\n", "from .two import b\nfrom .one import a\n"]
)
@pytest.mark.parametrize("file", ["one.py", "two.py"])
def test_the_modules_of_a_package_count_when_the_factory_is_the_package_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, file: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text(order)
    (package / "one.py").write_text("a = 1\n")
    (package / "two.py").write_text("b = 1\n")
    before = describe_sources("own_package:build")

    (package / file).write_text("a = b = 2\n")

    assert describe_sources("own_package:build") != before


def test_a_module_that_the_factory_does_not_reach_does_not_count(root: Path) -> None:
    before = describe_sources(FACTORY)

    (root / "own_model" / "unused.py").write_text("value = 2\n")

    assert describe_sources(FACTORY) == before


def test_a_change_elsewhere_leaves_the_digests_of_other_modules(root: Path) -> None:
    before = describe_sources(FACTORY)

    (root / "own_plain.py").write_text("value = 2\n")

    assert describe_sources(FACTORY) == {**before, "own_plain": digest("value = 2\n")}


def test_local_modules_are_told_by_the_sha256_of_their_content(root: Path) -> None:
    del root
    found = describe_sources(FACTORY)

    assert {name: found[name] for name in ("own_model.build", "own_plain")} == {
        "own_model.build": digest(FILES["own_model/build.py"]),
        "own_plain": digest(FILES["own_plain.py"]),
    }


def test_installed_packages_are_told_by_their_version_whatever_their_import_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_user.py").write_text("import numpy.linalg\nfrom yaml import safe_load\n")

    found = describe_sources("own_user:build")

    assert (sorted(found), found["numpy"], found["yaml"]) == (
        ["numpy", "own_user", "yaml"],
        f"numpy {importlib.metadata.version('numpy')}",
        f"PyYAML {importlib.metadata.version('PyYAML')}",
    )


@pytest.mark.parametrize("name", ["os", "json", "json.decoder", "absent_optional", "own_model.deep.layer.Layer"])
def test_the_standard_library_and_what_is_no_module_are_left_out(root: Path, name: str) -> None:
    del root

    assert name not in describe_sources(FACTORY)


def test_nothing_is_imported(root: Path) -> None:
    del root
    describe_sources(FACTORY)

    assert [name for name in sys.modules if name.startswith(("own_model", "own_plain"))] == []


def test_a_factory_in_an_installed_package_is_told_by_the_version_alone() -> None:
    assert describe_sources("numpy.linalg:norm") == {"numpy": f"numpy {importlib.metadata.version('numpy')}"}


def test_modules_that_import_each_other_are_described_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_chicken.py").write_text("import own_egg\n")
    (tmp_path / "own_egg.py").write_text("import own_chicken\n")

    assert describe_sources("own_chicken:build") == {
        "own_chicken": digest("import own_egg\n"),
        "own_egg": digest("import own_chicken\n"),
    }


@pytest.mark.parametrize("module", ["own_absent", "own_model.absent", "own_plain.absent"])
def test_a_module_that_cannot_be_found_is_a_mistake_in_the_configuration(root: Path, module: str) -> None:
    del root
    with pytest.raises(SettingsError) as caught:
        describe_sources(f"{module}:build")

    assert str(caught.value) == f"model.factory = '{module}:build': no module {module} found; is it on PYTHONPATH?"
