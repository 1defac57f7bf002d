"""The text of a completion as it grows: whole characters only, and nothing past a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from rtk.serve.engine import Engine


class CompletionText:
    """Turns generated tokens into text.

    Attributes:
        text: what may be shown so far.
        stop_reason: the stop string that ended it, or None.
    """

    def __init__(self, engine: Engine, stop: Sequence[str]) -> None:
        self._engine = engine
        self._stop = stop
        # A stop string may begin in this token and end in the next, so that much is held back.
        self._hold_back = max((len(string) for string in stop), default=1) - 1
        self._tokens: list[int] = []
        self.text = ""
        self.stop_reason: str | None = None

    def add(self, token: int, *, last: bool) -> str:
        """Take one more token; return the new part of the text."""
        self._tokens.append(token)
        whole: str = self._engine.tokenizer.decode(self._tokens, skip_special_tokens=True)
        found = [(whole.find(string), string) for string in self._stop if string in whole]
        if found:
            end, self.stop_reason = min(found)
        elif last:
            end = len(whole)
        else:
            # U+FFFD at the end is a character of which a part is still to come.
            end = max(len(self.text), len(whole.rstrip("\ufffd")) - self._hold_back)
        new = whole[len(self.text) : end]
        self.text = whole[:end]
        return new
