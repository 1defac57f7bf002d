"""Routes of one sequence, together with all that is needed to make sense of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rtk.errors import TraceError
from rtk.layout.model_layout import ModelLayout


@dataclass(frozen=True, eq=False)
class RouteTrace:
    """One sequence's tokens and the experts that each MoE layer's router chose for them.

    A trace is checked for its structure when it is made. Whether the routes themselves are plausible
    (in range, distinct, not all zero) is what `rtk.replay.check` reports: a faulty capture has to be
    representable, or it could not be diagnosed.

    Attributes:
        token_ids: int32 `[tokens]`, the prompt and then what was generated.
        token_text: one string a token, as it reads alone.
        prompt_tokens: how many of the tokens are the prompt.
        routed_experts: expert ids `[rows, layers, top_k]`, in the compact dtype they came in, ALL layers
            of the model (a dense layer's rows are 0), slots in router order. Row i belongs to token i.
            `rows` is `tokens - 1` for a sampled sequence, whose last token was never forwarded, or
            `tokens` for a sequence that was forwarded whole.
        layout: the model's layers and routers.
        logprobs: float32 `[tokens - prompt_tokens]`, natural log, of the generated tokens; or None.
        source: where the trace came from, as plain JSON values (server, model, sampling settings, ...).

    Raises:
        TraceError: an array has another shape or type than the above; the message names both.
    """

    token_ids: npt.NDArray[np.int32]
    token_text: tuple[str, ...]
    prompt_tokens: int
    routed_experts: npt.NDArray[np.integer[Any]]
    layout: ModelLayout
    logprobs: npt.NDArray[np.float32] | None = None
    source: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        token_ids = _integers(self.token_ids, "token_ids", ndim=1)
        if len(token_ids) and (token_ids.min() < 0 or token_ids.max() > np.iinfo(np.int32).max):
            raise TraceError(
                f"token_ids hold {token_ids.min()}..{token_ids.max()}; ids are int32 and not negative"
            )
        object.__setattr__(self, "token_ids", token_ids.astype(np.int32))
        object.__setattr__(self, "token_text", tuple(self.token_text))
        object.__setattr__(self, "routed_experts", _integers(self.routed_experts, "routed_experts", ndim=3))
        if self.logprobs is not None:
            object.__setattr__(self, "logprobs", np.asarray(self.logprobs, dtype=np.float32))
        try:
            object.__setattr__(self, "source", json.loads(json.dumps(dict(self.source))))
        except (TypeError, ValueError) as error:
            raise TraceError(
                f"source must hold plain JSON values, so that it can be saved: {error}"
            ) from error
        self._check_structure()

    def _check_structure(self) -> None:
        tokens = len(self.token_ids)
        if not 1 <= self.prompt_tokens <= tokens:
            raise TraceError(
                f"prompt_tokens is {self.prompt_tokens}, which must lie in 1..{tokens} (the tokens)"
            )
        if len(self.token_text) != tokens:
            raise TraceError(f"token_text has {len(self.token_text)} strings for {tokens} tokens")
        generated = tokens - self.prompt_tokens
        if self.logprobs is not None and self.logprobs.shape != (generated,):
            raise TraceError(
                f"logprobs have shape {list(self.logprobs.shape)}; {generated} generated tokens need [{generated}]"
            )
        rows, layers, top_k = self.routed_experts.shape
        if rows not in (tokens - 1, tokens):
            raise TraceError(
                f"routed_experts have {rows} rows for {tokens} tokens ({self.prompt_tokens} prompt + {generated} "
                f"generated). A sampled sequence has {tokens - 1}: its last token was never forwarded. Other "
                "counts come from a server that dropped the prompt's rows (ask for all of them) or from turns "
                "that were joined twice"
            )
        if layers != self.layout.num_layers or top_k != self.layout.top_k:
            raise TraceError(
                f"routed_experts are [rows, {layers} layers, top-{top_k}], while the model's layout has "
                f"{self.layout.num_layers} layers and top-{self.layout.top_k}: the routes or the layout belong "
                "to another model"
            )

    @property
    def rows(self) -> int:
        """How many tokens have routes."""
        return int(self.routed_experts.shape[0])

    @property
    def text(self) -> str:
        """The tokens' texts joined: what was prompted and generated."""
        return "".join(self.token_text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RouteTrace):
            return NotImplemented
        same_logprobs = (
            self.logprobs is other.logprobs
            if self.logprobs is None or other.logprobs is None
            else np.array_equal(self.logprobs, other.logprobs, equal_nan=True)
        )
        return (
            same_logprobs
            and np.array_equal(self.token_ids, other.token_ids)
            and self.token_text == other.token_text
            and self.prompt_tokens == other.prompt_tokens
            and self.routed_experts.dtype == other.routed_experts.dtype
            and np.array_equal(self.routed_experts, other.routed_experts)
            and self.layout == other.layout
            and self.source == other.source
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        generated = len(self.token_ids) - self.prompt_tokens
        return (
            f"RouteTrace({self.prompt_tokens} prompt + {generated} generated tokens, "
            f"routed_experts {list(self.routed_experts.shape)} {self.routed_experts.dtype}, "
            f"{len(self.layout.moe_layers)} MoE layers of {self.layout.num_experts} experts)"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this one trace; see `save_traces`."""
        from rtk.trace.file import save_traces

        save_traces([self], path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RouteTrace:
        """Read a file that holds one trace.

        Raises:
            TraceError: as `load_traces`, or the file holds several traces.
        """
        from rtk.trace.file import load_traces

        traces = load_traces(path)
        if len(traces) != 1:
            raise TraceError(f"{path} holds {len(traces)} traces; read it with rtk.load_traces")
        return traces[0]


def _integers(values: Any, name: str, *, ndim: int) -> npt.NDArray[np.integer[Any]]:
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise TraceError(f"{name} have dtype {array.dtype}; ids are whole numbers")
    if array.ndim != ndim:
        raise TraceError(f"{name} have shape {list(array.shape)}; {ndim} dimension(s) are needed")
    return array
