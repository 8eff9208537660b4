"""What a configuration names: `package.module:function`, options of a function, an optional library."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypeVar

from mycelia.engine.errors import ConfigError, MyceliaError

__all__ = ["check_options", "chosen", "import_extra", "is_reference", "nearest", "resolve", "user_code"]

_T = TypeVar("_T")
_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_reference(text: str) -> bool:
    """Whether `text` has the form `package.module:function`.

    >>> is_reference("my.models:wide"), is_reference("csv:/data/train.csv")
    (True, False)
    """
    return _REFERENCE.fullmatch(text) is not None


def resolve(reference: str, *, kind: str = "object") -> Callable[..., Any]:
    """The callable that `package.module:function` names; modules of the current folder are found too.

    Installed modules win over those of the current folder, which stays at the end of `sys.path` so that
    the module's own late imports, and spawned workers, find it as well.

    Args:
        reference: `package.module:function`; a dotted attribute (`module:Class.method`) works too.
        kind: what is being looked for ("model", "data", "selector", …); it starts the error message.

    Raises:
        ConfigError: not of that form, no such module or attribute, the import fails, or not callable.

    >>> resolve("math:hypot", kind="function")(3, 4)
    5.0
    """
    who = f"{kind} {reference!r}"
    if not is_reference(reference):
        raise ConfigError("is not a reference", rule="the form is package.module:function", who=who)
    module_name, _, path = reference.partition(":")
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()
    found = _import(module_name, who, folder)
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigError(
                f"{_describe(found)} has no {name!r}", fix=nearest(name, dir(found)), who=who
            ) from None
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"is a {type(found).__name__}", rule="it must be callable", who=who)
    return found


def check_options(
    function: Callable[..., Any], options: Mapping[str, object], who: str, *, given: Collection[str] = ()
) -> None:
    """Refuse options that `function` has no parameter for, or that it lacks.

    Args:
        function: what will be called with `options` as keyword arguments.
        options: the options, by name.
        who: starts the error message.
        given: parameters that come from elsewhere and are no options of the user.

    Raises:
        ConfigError: an option is unknown or missing; the message lists the valid ones.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(**{**dict.fromkeys(given), **options})
    except TypeError as error:
        known = [name for name in signature.parameters if name not in given]
        unknown = [name for name in options if name not in signature.parameters]
        raise ConfigError(
            f"no option is called {unknown[0]!r}" if unknown else str(error),
            rule=f"its options are {', '.join(known)}" if known else "it has no options",
            fix=nearest(unknown[0], known) if unknown else "",
            who=who,
        ) from None


def chosen(table: Mapping[str, _T], name: str, *, kind: str, who: str, also: str = "") -> _T:
    """The entry of a table that a configuration names.

    Args:
        table: entries by name.
        name: what was asked for.
        kind: what an entry is, as the message says it.
        who: the setting.
        also: what may be named beside the entries, such as "package.module:function".

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in table:
        raise ConfigError(
            f"no {kind} is called {name!r}",
            rule=f"one of {', '.join(table)}{also and f', or {also}'}",
            fix=nearest(name, table),
            who=who,
        )
    return table[name]


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint at the likeliest of `names`, or nothing.

    >>> nearest("lenett", ["lenet", "cnn"])
    "did you mean 'lenet'?"
    """
    close = get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def import_extra(module: str, extra: str, *, who: str) -> Any:
    """A module of a library that only the extra of that name installs.

    Raises:
        ConfigError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"needs {error.name}, which is not installed", fix=f"pip install 'mycelia[{extra}]'", who=who
        ) from None


def _import(name: str, who: str, folder: str) -> object:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"importing {name} needs {error.name}, which is not installed", who=who
            ) from error
        raise ConfigError(
            f"no module named {error.name}",
            rule="the module is installed or lies in the current folder",
            fix=f"looked in the current folder {folder} and the {len(sys.path)} folders of sys.path",
            who=who,
        ) from None
    except Exception as error:
        raise ConfigError(f"importing {name} raised {type(error).__name__}: {error}", who=who) from error


def _describe(found: object) -> str:
    name = getattr(found, "__name__", type(found).__name__)
    file = getattr(found, "__file__", None)
    return f"{name} ({file})" if file else name


@contextmanager
def user_code(who: str) -> Iterator[None]:
    """What a user's own code raises becomes a MyceliaError that names it and keeps the traceback."""
    try:
        yield
    except MyceliaError:
        raise
    except Exception as error:
        trace = "".join(traceback.format_exception(error)).rstrip()
        raise MyceliaError(f"it raised {type(error).__name__}: {error}\n{trace}", who=who) from error
