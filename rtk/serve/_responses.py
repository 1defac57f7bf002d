"""The embedded server's answers, field for field as vLLM 0.30 sends them."""

from __future__ import annotations

import base64
import io
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rtk.serve.engine import Engine, Token


def encode_routes(routes: npt.NDArray[np.unsignedinteger[Any]]) -> str:
    """Base64 of a .npy file of expert ids `[tokens, layers, top_k]`."""
    buffer = io.BytesIO()
    np.save(buffer, routes, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()


def request_id(kind: str) -> str:
    """A new name for a request, as vLLM builds them."""
    return f"{kind}-{uuid.uuid4().hex[:16]}"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Token counts of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def generate_choice(
    index: int, tokens: Sequence[Token], *, logprobs: bool, routes: str | None
) -> dict[str, Any]:
    """A choice of `/inference/v1/generate`, whole or one event of a stream."""
    return {
        "index": index,
        "logprobs": {"content": [_raw_logprob(token) for token in tokens]} if logprobs else None,
        "finish_reason": tokens[-1].finish_reason,
        "token_ids": [token.id for token in tokens],
        "routed_experts": routes,
        "sampling_mask": None,
    }


def generate_response(
    name: str, model: str, choices: list[dict[str, Any]], prompt_tokens: int
) -> dict[str, Any]:
    """The whole answer of `/inference/v1/generate`."""
    return {
        "request_id": name,
        "model": model,
        "created": int(time.time()),
        "choices": choices,
        "usage": usage(prompt_tokens, sum(len(choice["token_ids"]) for choice in choices)),
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "mm_placeholders": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def _raw_logprob(token: Token) -> dict[str, Any]:
    # The sampled token stands first, then the most probable ones, without a repeat.
    listed = [(token.id, token.logprob), *((id_, value) for id_, value in token.top if id_ != token.id)]
    entries = [{"token": f"token_id:{id_}", "logprob": value, "bytes": None} for id_, value in listed]
    return {**entries[0], "top_logprobs": entries}


def completion_logprobs(engine: Engine, tokens: Sequence[Token], text_before: int) -> dict[str, Any]:
    """The logprobs object of `/v1/completions`; offsets count characters of the answer."""
    texts = [engine.tokenizer.decode([token.id]) for token in tokens]
    ends = np.cumsum([text_before, *map(len, texts)]).tolist()
    return {
        "text_offset": ends[:-1],
        "token_logprobs": [token.logprob for token in tokens],
        "tokens": texts,
        "top_logprobs": [
            {engine.tokenizer.decode([id_]): value for id_, value in [(token.id, token.logprob), *token.top]}
            for token in tokens
        ],
    }


def completion_response(
    name: str, model: str, version: str, choices: list[dict[str, Any]], counts: dict[str, Any]
) -> dict[str, Any]:
    """The whole answer of `/v1/completions`."""
    return {
        "id": name,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": f"vllm-{version}",
        "usage": counts,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def event(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
