"""From what a server sends to results: the n sequences of a request, whole or piece by piece."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rtk.client import routed_experts as wire
from rtk.client.result import GenerateChunk, RemoteGenerateResult, WeightVersionSpan
from rtk.client.servers import Route
from rtk.errors import PayloadError, RoutesMissing

T = TypeVar("T")


def _latest(found: T, before: T) -> T:
    """What an event has, or where it has nothing what came before; 0 and an empty list are something."""
    return before if found is None else found


@dataclass
class _Sequence:
    """What has come of one sequence; in a stream each part in whichever event has it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None
    stop_match: str | int | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    routes: wire.Routes | None = None


class Reading:
    """Reads one answer.

    Args:
        route: the route that it comes from.
        advice: what to do where it has no routes.
        url: where it comes from, for messages.
        n: how many sequences were asked for.
        prompt_tokens: how many tokens the prompt has; None where the server has to say.
        routed_experts: whether routes were asked for.
        start: the first token whose routes were asked for.
        top_logprobs: whether alternatives were asked for.
    """

    def __init__(
        self,
        route: Route,
        url: str,
        *,
        advice: str,
        n: int,
        prompt_tokens: int | None,
        routed_experts: bool,
        start: int,
        top_logprobs: bool,
    ) -> None:
        self._route = route
        self._advice = advice
        self._url = url
        self._n = n
        self._prompt_tokens = prompt_tokens
        self._routed_experts = routed_experts
        self._start = start
        self._top_logprobs = top_logprobs
        self._sequences: dict[int, _Sequence] = {}
        self._prompt_ids: list[int] | None = None
        self._request_id: str | None = None

    def whole(self, payload: Mapping[str, Any]) -> list[RemoteGenerateResult]:
        """The results of an answer in one piece, by index.

        Raises:
            PayloadError: it is not of the form, or has other sequences than were asked for.
            RoutesMissing: routes were asked for, and it has none.
        """
        choices = self._route.choices(payload)
        if len(choices) != self._n:
            raise PayloadError(f"the answer has {len(choices)} choices, and n is {self._n}")
        for choice in choices:
            if self._index(choice) in self._sequences:
                raise PayloadError(f"the answer has sequence {self._index(choice)} twice")
            self._take(payload, choice)
        return self._results()

    def piece(self, event: Mapping[str, Any], on_chunk: Callable[[GenerateChunk], None]) -> None:
        """Take in one event of a stream, and hand on what it adds."""
        if self._route.events_end(event):
            # It may bring routes all the same, for the first sequence as SGLang does.
            self._take_routes(event, {}, self._sequences.setdefault(0, _Sequence()))
            return
        for choice in self._route.choices(event):
            on_chunk(self._take(event, choice))

    def end(self) -> list[RemoteGenerateResult]:
        """The results of a stream that has ended; raises as `whole`."""
        for index in range(self._n):
            sequence = self._sequences.get(index, _Sequence())
            if sequence.finish_reason is None:
                raise PayloadError(
                    f"{self._url}: the stream ended after {len(sequence.token_ids)} tokens without a finish reason. "
                    "vLLM 0.30 may end one so when it aborts the request, as a pause does"
                )
            if sequence.logprobs is not None and len(sequence.logprobs) != len(sequence.token_ids):
                raise PayloadError(
                    f"{self._url}: the stream brought {len(sequence.logprobs)} logprobs for "
                    f"{len(sequence.token_ids)} tokens"
                )
        return self._results()

    def _index(self, choice: Mapping[str, Any]) -> int:
        index = choice.get("index", 0)
        if type(index) is not int or not 0 <= index < self._n:
            raise PayloadError(f"the answer has a sequence with index {index!r}, and n is {self._n}")
        return index

    def _take(self, payload: Mapping[str, Any], choice: Mapping[str, Any]) -> GenerateChunk:
        route, index = self._route, self._index(choice)
        sequence = self._sequences.setdefault(index, _Sequence())
        chunk = route.chunk(choice)
        sequence.token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            sequence.logprobs = (sequence.logprobs or []) + chunk.logprobs
        if self._top_logprobs and chunk.token_ids:
            sequence.top_logprobs = (sequence.top_logprobs or []) + route.top_logprobs(choice)
        sequence.finish_reason = _latest(route.finish_reason(choice), sequence.finish_reason)
        sequence.stop_match = _latest(route.stop_match(choice), sequence.stop_match)
        sequence.prompt_logprobs = _latest(route.prompt_logprobs(payload, choice), sequence.prompt_logprobs)
        sequence.weight_versions = _latest(route.weight_versions(choice), sequence.weight_versions)
        self._take_routes(payload, choice, sequence)
        self._request_id = _latest(route.request_id(payload), self._request_id)
        self._prompt_ids = self._prompt_ids or route.prompt_token_ids(payload, choice)
        return chunk if index == 0 else replace(chunk, index=index)

    def _take_routes(
        self, payload: Mapping[str, Any], choice: Mapping[str, Any], sequence: _Sequence
    ) -> None:
        if self._routed_experts:
            sequence.routes = _latest(self._route.routed_experts(payload, choice), sequence.routes)

    def _results(self) -> list[RemoteGenerateResult]:
        return [self._result(self._sequences[index]) for index in range(self._n)]

    def _result(self, sequence: _Sequence) -> RemoteGenerateResult:
        if sequence.finish_reason is None:
            raise PayloadError(
                f"{self._url} names no finish reason, so that it is unknown how the answer ended"
            )
        return RemoteGenerateResult(
            token_ids=sequence.token_ids,
            logprobs=sequence.logprobs,
            stop_reason=sequence.finish_reason,
            routed_experts=self._checked_routes(sequence) if self._routed_experts else None,
            request_id=self._request_id,
            routed_experts_start=self._start,
            stop_match=sequence.stop_match,
            top_logprobs=sequence.top_logprobs,
            prompt_logprobs=sequence.prompt_logprobs,
            prompt_token_ids=self._prompt_ids,
            weight_versions=sequence.weight_versions,
        )

    def _checked_routes(self, sequence: _Sequence) -> wire.Routes:
        generated, decoded = len(sequence.token_ids), sequence.routes
        if decoded is None and sequence.finish_reason == "abort":
            raise RoutesMissing(
                f"{self._url} aborted the request after {generated} tokens and sent no routed experts for them, as vLLM "
                "does in a stream or before it began. Send it again once the server goes on"
            )
        if decoded is None:
            raise RoutesMissing(f"{self._url} sent no routed experts: {self._advice}")
        prompt = len(self._prompt_ids or []) if self._prompt_tokens is None else self._prompt_tokens
        if not prompt:
            raise PayloadError(
                f"{self._url} does not name the prompt's tokens, so that its routes cannot be told apart: it needs "
                "vLLM's return_token_ids"
            )
        all_rows = prompt + generated - 1
        if self._start and len(decoded) == all_rows:
            # What strands-sglang #72 is about: joined to earlier turns these rows would be counted twice.
            warnings.warn(
                f"{self._url} ignored the start offset {self._start} and sent the routes of all {all_rows} tokens; those "
                f"from {self._start} on are kept, as they were asked for",
                stacklevel=2,
            )
            return decoded[self._start :]
        if len(decoded) != all_rows - self._start:
            raise PayloadError(
                f"{self._url} sent routes of {len(decoded)} tokens for {prompt} prompt and {generated} generated tokens"
                f"{f' from token {self._start} on' if self._start else ''}; {all_rows - self._start} rows are expected, "
                "since the last token was never forwarded"
            )
        return decoded
