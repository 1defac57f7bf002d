"""The text of an answer as it grows: whole characters only, and nothing past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rtk.serve.engine import Token

# Decoding starts so many tokens before the answer: some tokenizers write a word's first token
# without its space where nothing comes before it.
_CONTEXT_TOKENS = 5


@dataclass(frozen=True)
class TextOptions:
    """How an answer becomes text.

    Attributes:
        stop: texts that end the answer.
        keep_stop: whether the answer ends with what stopped it, text or token, instead of before it.
        skip_special_tokens: whether special tokens have no text.
        min_tokens: a stop text counts only after so many tokens.
    """

    stop: Sequence[str] = ()
    keep_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0


@dataclass(frozen=True)
class Piece:
    """A token, with the text that can be shown now that it is there.

    Attributes:
        token: the token.
        text: may be empty, and may begin before this token.
        finish_reason: "stop" or "length" on the last piece, else None.
        stop_reason: the stop text or stop token that ended the answer, else None.
    """

    token: Token
    text: str
    finish_reason: str | None
    stop_reason: str | int | None


class AnswerText:
    """Turns the tokens of one answer into pieces."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], options: TextOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._context_start = 0
        self._decoded_to = len(self._tokens)
        self._count = 0
        self._text = ""
        self._searched_to = 0
        self._shown_to = 0
        # A stop text may begin in this token and end in the next, so that much is held back.
        longest = max(map(len, options.stop), default=1)
        self._hold_back = 0 if options.keep_stop else longest - 1

    def add(self, token: Token) -> Piece:
        """Take one more token."""
        self._count += 1
        if token.finish_reason != "stop" or self._options.keep_stop:
            self._text += self._decode(token.id)
        stop = self._find_stop()
        if stop is not None:
            return Piece(token, self._show(len(self._text)), "stop", stop)
        if token.finish_reason is not None:
            return Piece(token, self._show(len(self._text)), token.finish_reason, token.stop_reason)
        return Piece(token, self._show(len(self._text) - self._hold_back), None, None)

    def _decode(self, token: int) -> str:
        self._tokens.append(token)
        context = self._to_text(self._tokens[self._context_start : self._decoded_to])
        both = self._to_text(self._tokens[self._context_start :])
        if both.endswith("\ufffd"):
            return ""  # a character of which a part is still to come
        self._context_start, self._decoded_to = self._decoded_to, len(self._tokens)
        return both[len(context) :]

    def _to_text(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._options.skip_special_tokens)
        return text

    def _find_stop(self) -> str | None:
        """Look for the stop text that is complete first, and cut the text there."""
        start, self._searched_to = self._searched_to, len(self._text)
        if self._count <= self._options.min_tokens:
            return None
        ends = []
        for stop in self._options.stop:
            at = self._text.find(stop, max(0, start - len(stop) + 1))
            if at >= 0:
                ends.append((at + len(stop), stop))
        if not ends:
            return None
        end, stop = min(ends)
        self._text = self._text[: end if self._options.keep_stop else end - len(stop)]
        return stop

    def _show(self, end: int) -> str:
        start, self._shown_to = self._shown_to, max(self._shown_to, end)
        return self._text[start : self._shown_to]
