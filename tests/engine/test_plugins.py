"""References, options and optional libraries that a configuration names."""

import os
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest

from mycelia.engine.errors import ConfigError
from mycelia.engine.plugins import check_options, import_extra, is_reference, resolve


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder of its own; imports from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("plug"):
            del sys.modules[name]


def test_an_installed_function_and_a_nested_attribute() -> None:
    assert resolve("os.path:join") is os.path.join
    assert resolve("collections:OrderedDict.fromkeys")("ab") == OrderedDict.fromkeys("ab")


def test_a_module_of_the_current_folder_with_its_own_late_import(folder: Path) -> None:
    (folder / "plug_one.py").write_text("def make():\n    import plug_two\n    return plug_two.VALUE\n")
    (folder / "plug_two.py").write_text("VALUE = 7\n")
    assert resolve("plug_one:make", kind="model")() == 7


def test_the_current_folder_does_not_hide_installed_modules(folder: Path) -> None:
    (folder / "json.py").write_text("raise RuntimeError\n")
    assert sys.path[-1] != str(folder)
    resolve("os.path:join")
    assert sys.path[-1] == str(folder)


@pytest.mark.parametrize(
    "text", ["", "a", "a:", ":b", "a.b", "a:b:c", "1a:b", "a..b:c", "a b:c", "csv:/x/y.csv", "a:b\n"]
)
def test_what_is_no_reference(text: str) -> None:
    assert not is_reference(text)
    with pytest.raises(ConfigError, match=r"package\.module:function"):
        resolve(text)


def test_a_missing_module_says_where_it_looked(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no module named plug_absent") as caught:
        resolve("plug_absent.models:make", kind="model")
    assert str(folder) in str(caught.value)
    assert str(caught.value).startswith("model 'plug_absent.models:make'")


def test_a_missing_submodule_is_named(folder: Path) -> None:
    (folder / "plug_package").mkdir()
    (folder / "plug_package" / "__init__.py").touch()
    with pytest.raises(ConfigError, match=r"no module named plug_package\.absent"):
        resolve("plug_package.absent:make")


def test_what_the_module_itself_lacks_is_told_apart(folder: Path) -> None:
    (folder / "plug_needs.py").write_text("import a_library_that_is_not_there\n")
    with pytest.raises(ConfigError, match="needs a_library_that_is_not_there, which is not installed"):
        resolve("plug_needs:make")


@pytest.mark.parametrize(("source", "message"), [("1 / 0", "ZeroDivisionError"), ("def f(:", "SyntaxError")])
def test_an_import_that_fails(folder: Path, source: str, message: str) -> None:
    (folder / "plug_broken.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        resolve("plug_broken:make")


def test_a_missing_attribute_names_the_file_and_the_nearest(folder: Path) -> None:
    (folder / "plug_names.py").write_text("def make_model(): ...\n")
    with pytest.raises(ConfigError, match="did you mean 'make_model'") as caught:
        resolve("plug_names:make_modle")
    assert "plug_names.py" in str(caught.value)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="is a float"):
        resolve("math:pi")


def test_options_are_checked_against_the_signature() -> None:
    def function(path: str, *, width: int, depth: int = 1) -> None: ...

    check_options(function, {"width": 1}, "model", given=["path"])
    with pytest.raises(ConfigError, match=r"no option is called 'widht'.*\n.*width, depth\n.*'width'"):
        check_options(function, {"widht": 1}, "model", given=["path"])
    with pytest.raises(ConfigError, match=r"missing a required.*'width'"):
        check_options(function, {}, "model", given=["path"])


def test_an_absent_library_names_its_extra() -> None:
    assert import_extra("math", "image", who="data").pi > 3
    with pytest.raises(ConfigError, match=r"needs absent_library.*\n.*pip install 'mycelia\[image\]'"):
        import_extra("absent_library", "image", who="data")
