"""What one call of `Session.sample` gives back."""

from __future__ import annotations

from dataclasses import dataclass

from rtk.client.result import RemoteGenerateResult
from rtk.trace.route_trace import RouteTrace


@dataclass(frozen=True)
class Sample:
    """One prompt and what the model made of it.

    Attributes:
        text: the generated text.
        prompt_token_ids: the prompt's tokens.
        result: the server's answer.
        trace: the routes with their tokens and layout; None where they were not asked for.
        prompt_index, sample_index: which prompt of a `sample_many` this answers, and which of the n samples of
            that prompt it is, both from 0.
    """

    text: str
    prompt_token_ids: list[int]
    result: RemoteGenerateResult
    trace: RouteTrace | None
    prompt_index: int = 0
    sample_index: int = 0
