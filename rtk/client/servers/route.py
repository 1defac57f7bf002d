"""One route of a server: how it is asked for sequences, and where its answer holds what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from rtk.client import routed_experts as wire
from rtk.client.result import GenerateChunk, WeightVersionSpan
from rtk.client.servers.fields import Alternatives, Json

#: A prompt as a route takes it: token ids, or for a chat its messages.
Prompt = Sequence[int] | Sequence[Json]


class Route(ABC):
    """How one path is asked, how its answers are read, and what it can do.

    Attributes:
        path: where requests are posted.
        chat: whether a prompt is a chat's messages.
        streams, streams_routes: whether an answer can be streamed at all, and with its routes.
        several: whether one request may ask for more than one sequence.
        features: whether it takes multi-modal inputs.
        start_offset: whether it leaves out the rows before the token that was asked for.
        cache_salt: the body's field that keeps prefix caches apart.
    """

    path: str
    chat: ClassVar[bool] = False
    streams: ClassVar[bool] = True
    streams_routes: ClassVar[bool] = True
    several: ClassVar[bool] = True
    features: ClassVar[bool] = False
    start_offset: ClassVar[bool] = True
    cache_salt: ClassVar[str] = "cache_salt"

    def can_stream(self, routed_experts: bool) -> bool:
        """Whether an answer can be streamed, with routes or without."""
        return self.streams_routes if routed_experts else self.streams

    def advice(self, status: int, said: str) -> str:
        """What to do about an HTTP status of 400 or more, as a sentence without its full stop; empty for nothing.

        Args:
            status: the status.
            said: the server's own words, which stand before the advice already.
        """
        return general_advice(status, said)

    @abstractmethod
    def body(
        self, prompt: Prompt, sampling_params: Json, *, routed_experts: bool, start: int = 0
    ) -> dict[str, Any]:
        """The request's body, without the fields that all routes share.

        Args:
            prompt: what to go on from.
            sampling_params: in vLLM's names.
            routed_experts: whether routes are wanted.
            start: the first token whose routes are wanted.
        """

    @abstractmethod
    def choices(self, payload: Json) -> Sequence[Json]:
        """The answer's sequences, or what an event has of them. Raises PayloadError where there is no list of them."""

    @abstractmethod
    def chunk(self, choice: Json) -> GenerateChunk:
        """Its tokens and logprobs. Raises PayloadError where they are not as the route promises."""

    @abstractmethod
    def top_logprobs(self, choice: Json) -> Alternatives:
        """For each token of the chunk its alternatives. Raises PayloadError where they are not as promised."""

    @abstractmethod
    def prompt_logprobs(self, payload: Json, choice: Json) -> Alternatives | None:
        """The same for the prompt; empty for its first token."""

    @abstractmethod
    def prompt_token_ids(self, payload: Json, choice: Json) -> list[int] | None:
        """The prompt's tokens, where the answer names them."""

    @abstractmethod
    def finish_reason(self, choice: Json) -> str | None:
        """Why it ended; None in the middle of a stream."""

    @abstractmethod
    def stop_match(self, choice: Json) -> str | int | None:
        """The stop string or token that ended it, where the answer names it."""

    @abstractmethod
    def request_id(self, payload: Json) -> str | None:
        """The server's name for the request."""

    def weight_versions(self, choice: Json) -> list[WeightVersionSpan] | None:
        """Which weights sampled which tokens, where the answer says it."""
        return None

    def events_end(self, event: Json) -> bool:
        """Whether an event of a stream speaks of the whole answer, and of none of its sequences."""
        return event.get("choices") == [] or ("choices" not in event and "usage" in event)

    @abstractmethod
    def routed_experts(self, payload: Json, choice: Json) -> wire.Routes | None:
        """Its routes `[rows, layers, top_k]`, or None where it has none."""


def general_advice(status: int, said: str) -> str:
    """What can be said of a status whatever the route."""
    if status in (401, 403):
        return "Give the server's key as api_key=..., or what else it wants in headers=..."
    return ""
