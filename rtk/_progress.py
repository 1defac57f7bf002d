"""The caller's side of a `sample_many`: a bar in a terminal or a notebook, and a tidy end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from tqdm.auto import tqdm

if TYPE_CHECKING:
    from rtk.many import ManySamples


class Progress:
    """Shows how far a `sample_many` is, and closes its file, whatever ends it.

    The bar is drawn in the caller's thread, which owns the notebook's output.

    Args:
        result: what it fills.
        shown: whether to show anything.
    """

    def __init__(self, result: ManySamples, *, shown: bool) -> None:
        self._result = result
        self._bar: Any = tqdm(total=result.wanted, initial=len(result), unit="sample", disable=not shown)

    def advance(self) -> None:
        """One sample more has come, or has failed."""
        if self._result.failures:
            self._bar.set_postfix(failed=len(self._result.failures), refresh=False)
        self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._bar.close()
        self._result.close()
        if error is not None:
            error.add_note(f"{self._result!r}; what was finished is in session.unfinished")
