"""The options of a session's four calls, each written down once."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from rtk.client.sampling_params import DEFAULTS, SamplingParams
from rtk.session.many import SampleFailure
from rtk.session.sample import Sample

P = ParamSpec("P")
T = TypeVar("T")


class SampleOptions(SamplingParams, total=False):
    """What `sample` and `asample` take beside the prompt; `Session.sample` says what each means."""

    routes: bool
    on_text: Callable[[str], None] | None
    source: Mapping[str, Any] | None


class ManyOptions(SamplingParams, total=False):
    """What `sample_many` and `asample_many` take beside the prompts; `Session.sample_many` says what each means."""

    n: int
    concurrency: int
    out: str | os.PathLike[str] | None
    routes: bool
    progress: bool
    on_sample: Callable[[Sample | SampleFailure], None] | None
    source: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


_SAMPLE: dict[str, Any] = {"routes": True, "on_text": None, "source": None}
_MANY: dict[str, Any] = {
    "n": 1,
    "concurrency": 32,
    "out": None,
    "routes": True,
    "progress": True,
    "on_sample": None,
    "source": None,
}
_DEFAULTS_OF: dict[type, dict[str, Any]] = {SampleOptions: _SAMPLE, ManyOptions: _MANY}


def split(options: Mapping[str, Any], kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """The call's own options, with their defaults, and apart from them the sampling parameters.

    Args:
        options: what was given.
        kind: SampleOptions or ManyOptions.
    """
    own = _DEFAULTS_OF[kind]
    params = {name: value for name, value in options.items() if name not in own}
    return {name: options.get(name, default) for name, default in own.items()}, params


def takes(kind: type) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Show the names of `kind`, with their defaults, in the signature of a function that takes them all.

    Jupyter shows a call's arguments by that signature, where it would show one **options.
    """
    defaults = {**_DEFAULTS_OF[kind], **DEFAULTS}
    annotations = {**inspect.get_annotations(kind), **inspect.get_annotations(SamplingParams)}

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        assert parameters.pop().kind is inspect.Parameter.VAR_KEYWORD
        parameters += [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=annotations[name].__forward_arg__,
            )
            for name, default in defaults.items()
        ]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate
