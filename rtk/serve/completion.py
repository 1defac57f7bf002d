"""One choice of `/v1/completions`, whole or in events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rtk.serve import responses
from rtk.serve.answer_text import Piece
from rtk.serve.engine import Generation, ScoredToken
from rtk.serve.requests import CompletionRequest


class Completion:
    """Puts a sequence's pieces, and its prompt where that is echoed, into vLLM's form."""

    def __init__(self, tokenizer: Any, wanted: CompletionRequest, index: int, sequence: Generation) -> None:
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._index = index
        self._sequence = sequence
        self._events = 0
        self._characters = 0

    def whole(self, pieces: Sequence[Piece], routes: str | None) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        text, logprobs = self._part(pieces, echo=True)
        ids = self._wanted.return_token_ids
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
            "token_ids": self._sequence.generated if ids else None,
            "prompt_logprobs": responses.prompt_logprobs(self._tokenizer, self._sequence.prompt_logprobs),
            "prompt_token_ids": self._sequence.prompt if ids else None,
            "routed_experts": routes,
        }

    def event(self, piece: Piece) -> dict[str, Any]:
        """The choice of one event of a stream; vLLM's carry no routes."""
        first = self._events == 0
        text, logprobs = self._part([piece], echo=first)
        self._events += 1
        self._characters += len(text)
        ids = self._wanted.return_token_ids
        names_prompt = first and (ids or self._wanted.echoes is not None)
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            "prompt_token_ids": self._sequence.prompt if names_prompt else None,
            "token_ids": [piece.token.id] if ids else None,
        }

    def _part(self, pieces: Sequence[Piece], *, echo: bool) -> tuple[str, dict[str, Any] | None]:
        text = "".join(piece.text for piece in pieces)
        scored: list[tuple[int, ScoredToken | None]] = [(piece.token.id, piece.token) for piece in pieces]
        if echo and self._wanted.echoes is not None:
            prompt = self._scored_prompt()
            text = self._wanted.echoes[self._index] + ("" if self._wanted.echo_only else text)
            scored = prompt if self._wanted.echo_only else prompt + scored
        count = self._sequence.params.logprobs
        if count is None:
            return text, None
        return text, responses.completion_logprobs(self._name, scored, count, self._characters)

    def _name(self, token: int) -> str:
        if self._wanted.tokens_as_ids:
            return f"token_id:{token}"
        text: str = self._tokenizer.decode([token])
        return text

    def _scored_prompt(self) -> list[tuple[int, ScoredToken | None]]:
        # Nothing comes before the first token, so it has no score.
        scores = self._sequence.prompt_logprobs or []
        return [(self._sequence.prompt[0], None), *((score.id, score) for score in scores)]
