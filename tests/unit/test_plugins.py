"""Plugins are found by file name and refused at load, with the reason."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from app import plugins
from app.checkpoints import CheckpointFormat
from app.errors import PluginError


class Animal(Protocol):
    plugin: bool
    sound: str

    @classmethod
    def catch(cls) -> object: ...

    @property
    def legs(self) -> int: ...

    def walk(self) -> None: ...

    def _private(self) -> None: ...


WHOLE = (
    "class Cat:\n    plugin = True\n    sound = 'meow'\n    legs = 4\n"
    "    @classmethod\n    def catch(cls): ...\n    def walk(self): ...\n"
)
MODULES = {
    "cat": f"class Helper:\n    pass\n{WHOLE}",
    "stone": "class Stone:\n    sound = ''\n",
    "unmarked": "class Unmarked:\n    plugin = False\n",
    "pair": f"{WHOLE}{WHOLE.replace('Cat', 'Dog')}",
    "borrowed": "from plugin_zoo.cat import Cat\n",
    "fish": "class Fish:\n    plugin = True\n    sound = ''\n    @classmethod\n    def catch(cls): ...\n",
    "absent": "import no_such_library_at_all\nclass Absent:\n    plugin = True\n",
    "_hidden": "",
}


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "plugin_zoo").mkdir()
    (tmp_path / "plugin_zoo" / "__init__.py").touch()
    for name, text in MODULES.items():
        (tmp_path / "plugin_zoo" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield "plugin_zoo"
    for name in [name for name in sys.modules if name.startswith("plugin_zoo")]:
        del sys.modules[name]


def test_the_names_are_those_of_the_files_without_the_hidden_ones(zoo: str) -> None:
    assert plugins.names(zoo) == ("absent", "borrowed", "cat", "fish", "pair", "stone", "unmarked")


def test_a_plugin_is_the_one_marked_class_of_its_file(zoo: str) -> None:
    found = plugins.load(zoo, "cat", Animal)

    assert (found.__module__, found.__name__, found.sound) == ("plugin_zoo.cat", "Cat", "meow")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("dog", "no plugin 'dog' in plugin_zoo; there are absent, borrowed, cat, fish, pair, stone, unmarked"),
        ("_hidden", "no plugin '_hidden' in plugin_zoo; there are absent, borrowed, cat, fish, pair, stone, unmarked"),
        ("stone", "plugin_zoo.stone must define one class with `plugin = True`, it defines 0"),
        ("unmarked", "plugin_zoo.unmarked must define one class with `plugin = True`, it defines 0"),
        ("borrowed", "plugin_zoo.borrowed must define one class with `plugin = True`, it defines 0"),
        ("pair", "plugin_zoo.pair must define one class with `plugin = True`, it defines 2"),
        ("fish", "plugin_zoo.fish.Fish lacks legs, walk of Animal"),
    ],
)
def test_what_cannot_be_a_plugin_is_refused_with_the_reason(zoo: str, name: str, told: str) -> None:
    with pytest.raises(PluginError) as caught:
        plugins.load(zoo, name, Animal)

    assert (str(caught.value), caught.value.exit_code) == (told, 2)


def test_a_plugin_whose_library_is_not_installed_is_refused_with_the_name_of_both(zoo: str) -> None:
    with pytest.raises(PluginError) as caught:
        plugins.load(zoo, "absent", Animal)

    assert "plugin_zoo.absent" in str(caught.value)
    assert "no_such_library_at_all" in str(caught.value)


@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("app.devices", ("cpu",)),
        ("app.checkpoints", ("dcp", "safetensors", "torch_zip")),
        ("app.engines", ("aot", "eager", "jit")),
    ],
)
def test_this_version_has_exactly_these_plugins(package: str, names: tuple[str, ...]) -> None:
    assert plugins.names(package) == names


def test_the_checkpoint_format_has_every_member_of_its_protocol() -> None:
    assert plugins.load("app.checkpoints", "safetensors", CheckpointFormat).name == "safetensors"
