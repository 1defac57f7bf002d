"""Packages that the bare core does without, and what to install where one is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

from rtk.errors import MissingPackage

P = ParamSpec("P")
T = TypeVar("T")

#: Under which name pip knows this project; `rtk` on PyPI is another one.
DISTRIBUTION = "moe-rtk"

_EXTRA_OF = {
    "ipywidgets": "notebook",
    "nest_asyncio2": "notebook",
    "pandas": "notebook",
    "seaborn": "notebook",
}


def need(package: str, what: str) -> None:
    """Check that a package is there before it is imported.

    Args:
        package: the name that is imported.
        what: what needs it, as a user calls it.

    Raises:
        MissingPackage: it is not installed; the message names the extra that brings it.
    """
    if find_spec(package) is None:
        raise MissingPackage(f"{what} needs {package}: {install(_EXTRA_OF[package])}", name=package)


def install(extra: str) -> str:
    """The command that brings an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


@contextmanager
def bringing(extra: str) -> Iterator[None]:
    """Import in this block what an extra brings; raises MissingPackage where something is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackage(f"{error}: {install(extra)}", name=error.name) from error


def needs(package: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have a public function check for a package before it runs; raises as `need`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        room = ".".join(function.__module__.split(".")[:2])
        what = f"{room}.{function.__name__}"

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            need(package, what)
            return function(*args, **kwargs)

        return checked

    return decorate
