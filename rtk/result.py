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
    """

    token_ids: list[int]
    logprobs: list[float] | None


@dataclass(frozen=True)
class RemoteGenerateResult:
    """The answer to one single-sequence, raw-token request.

    Attributes:
        token_ids: the generated tokens, without the prompt; a stop token is included, as servers do.
        logprobs: natural-log probability of each; None where none were asked for. A value that was
            missing or not finite is -9999.0, as SkyRL's servers send it.
        stop_reason: the server's `finish_reason`, for example "stop", "length" or "abort".
        routed_experts: expert ids `[prompt + generated - 1, layers, top_k]`, all layers, in the compact
            dtype of the wire; None where none were asked for. The last token has no row: it was sampled
            and never forwarded.
        request_id: the server's name for the request, for its logs; None where it gave none.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    stop_reason: str
    routed_experts: npt.NDArray[np.integer[Any]] | None = None
    request_id: str | None = None
