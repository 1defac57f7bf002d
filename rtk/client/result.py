"""What one generate request gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class GenerateChunk:
    """What one event of a streamed answer adds.

    Attributes:
        token_ids: the new tokens.
        logprobs: natural-log probability of each; None where none were asked for.
        index: which of the n sequences of the request it belongs to, from 0.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    index: int = 0


@dataclass(frozen=True)
class WeightVersionSpan:
    """Which weights sampled a run of generated tokens, as vLLM 0.32 and newer say it.

    Attributes:
        version: the server's label for the weights.
        start, end: the generated tokens `[start, end)`, counted from 0.
    """

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class RemoteGenerateResult:
    """One generated sequence.

    Attributes:
        token_ids: the generated tokens, without the prompt; a stop token is included, as servers do.
        logprobs: natural-log probability of each; None where none were asked for. A value that was
            missing or not finite is -9999.0, as SkyRL's servers send it.
        stop_reason: the server's `finish_reason`, for example "stop", "length" or "abort".
        routed_experts: expert ids `[prompt + generated - 1, layers, top_k]`, all layers, in the compact
            dtype of the wire; None where none were asked for. The last token has no row: it was sampled
            and never forwarded.
        request_id: the server's name for the request, for its logs; None where it gave none.
        routed_experts_start: the token of row 0 of routed_experts, as it was asked for.
        stop_match: the stop string or token that ended the sequence, where the server names it (vLLM's
            `stop_reason`; its generate route of 0.30 does not).
        top_logprobs: for each generated token the alternatives that the server names, token id to logprob, the sampled
            token among them; None unless `logprobs` of the request is above 0. vLLM counts the sampled token as
            one of them, so that `logprobs=1` names no other.
        prompt_logprobs: the same for each token of the prompt, itself among them; empty for the first, before which
            there is nothing. None unless the request has `prompt_logprobs`.
        prompt_token_ids: the prompt's tokens where the server names them, as it does for chats; else None.
        weight_versions: which weights sampled which of the tokens, where the server says it; else None.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    stop_reason: str
    routed_experts: npt.NDArray[np.integer[Any]] | None = None
    request_id: str | None = None
    routed_experts_start: int = 0
    stop_match: str | int | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float]] | None = None
    prompt_token_ids: list[int] | None = None
    weight_versions: list[WeightVersionSpan] | None = None
