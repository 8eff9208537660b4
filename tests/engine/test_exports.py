"""The public face of the engine, and what it costs to import."""

import subprocess
import sys

import pytest

from mycelia import engine


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["errors", "config", "rng"])
def test_light_modules_do_not_import_torch(module: str) -> None:
    assert run(f"import sys, mycelia.engine.{module}; print('torch' in sys.modules)").strip() == "False"


def test_every_name_is_where_it_is_said_to_be() -> None:
    for name in engine.__all__:
        assert getattr(engine, name).__name__ in (name, "dict"), name
    assert set(engine.__all__) <= set(dir(engine))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = engine.nothing_like_it


def test_a_name_does_not_depend_on_what_was_imported_before() -> None:
    before = "import mycelia.engine.transforms.precision, mycelia.engine.transforms.value_and_grad;"
    code = "from mycelia.engine import precision as p, value_and_grad as v; print(callable(p), callable(v))"
    assert run(before + code) == run(code) == "True True\n"
