"""The caller's side of a `sample_many`: a bar in a terminal or a notebook, and a tidy end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from tqdm.auto import tqdm

from rtk.session.many import ManySamples, SampleFailure
from rtk.session.sample import Sample


class Progress:
    """Shows how far a `sample_many` is, and closes its file, whatever ends it.

    The bar is drawn in the caller's thread, which owns the notebook's output.

    Args:
        result: what it fills.
        on_sample: called with each sample or failure; None calls nothing.
        shown: whether to show anything.
    """

    def __init__(
        self,
        result: ManySamples,
        on_sample: Callable[[Sample | SampleFailure], None] | None,
        *,
        shown: bool,
    ) -> None:
        self._result = result
        self._on_sample = on_sample
        self._bar: Any = tqdm(total=result.wanted, initial=len(result), unit="sample", disable=not shown)

    def advance(self, ended: Sample | SampleFailure) -> None:
        """One sample more has come, or has failed."""
        if self._result.failures:
            self._bar.set_postfix(failed=len(self._result.failures), refresh=False)
        self._bar.update()
        if self._on_sample is not None:
            self._on_sample(ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._bar.close()
        self._result.close()
        if error is not None:
            error.add_note(f"{self._result!r}; what was finished is in session.unfinished")
