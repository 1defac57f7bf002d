"""The embedded server's answers, field for field as vLLM 0.30 sends them."""

from __future__ import annotations

import base64
import io
import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rtk.serve.answer_text import Piece
from rtk.serve.engine import ScoredToken


def encode_routes(routes: npt.NDArray[np.unsignedinteger[Any]]) -> str:
    """Base64 of a .npy file of expert ids `[tokens, layers, top_k]`."""
    buffer = io.BytesIO()
    np.save(buffer, routes, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()


def request_id(kind: str) -> str:
    """A new name for a request, as vLLM builds them."""
    return f"{kind}-{uuid.uuid4().hex[:16]}"


def model_card(name: str, root: str, max_model_len: int, created: int) -> dict[str, Any]:
    """What `/v1/models` says of a model."""
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex[:16]}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "rtk",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [permission],
    }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Token counts of a request, as a stream ends with them."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def _full_usage(counts: dict[str, int]) -> dict[str, Any]:
    return {**counts, "prompt_tokens_details": None, "completion_tokens_details": None}


def generate_choice(
    index: int, pieces: Sequence[Piece], logprobs: int | None, routes: str | None
) -> dict[str, Any]:
    """A choice of `/inference/v1/generate`, whole or one event of a stream."""
    scores = None if logprobs is None else [_generate_logprob(piece.token, logprobs) for piece in pieces]
    return {
        "index": index,
        "logprobs": None if scores is None else {"content": scores},
        "finish_reason": pieces[-1].finish_reason,
        "token_ids": [piece.token.id for piece in pieces],
        "routed_experts": routes,
        "sampling_mask": None,
    }


def generate_response(
    name: str,
    model: str,
    choices: list[dict[str, Any]],
    counts: dict[str, int],
    *,
    prompt_logprobs: list[Any] | None,
    prompt_token_ids: list[int] | None,
) -> dict[str, Any]:
    """The whole answer of `/inference/v1/generate`."""
    return {
        "request_id": name,
        "model": model,
        "created": int(time.time()),
        "choices": choices,
        "usage": _full_usage(counts),
        "prompt_logprobs": prompt_logprobs,
        "prompt_token_ids": prompt_token_ids,
        "mm_placeholders": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def _sampled_first(score: ScoredToken) -> list[tuple[int, float]]:
    """The token itself and then the most probable ones, without a repeat."""
    return list(dict([(score.id, score.logprob), *score.top]).items())


def _generate_logprob(score: ScoredToken, count: int) -> dict[str, Any]:
    # This route counts the token itself among the `count`, where the completions put it in addition.
    entries = [
        {"token": f"token_id:{id_}", "logprob": value, "bytes": None}
        for id_, value in _sampled_first(score)[: max(count, 1)]
    ]
    return {**entries[0], "top_logprobs": entries}


def prompt_logprobs(tokenizer: Any, scores: list[ScoredToken] | None) -> list[Any] | None:
    """The prompt_logprobs of either route: null for the first token, then an object a token."""
    if scores is None:
        return None
    return [None, *(_prompt_logprob(tokenizer, score) for score in scores)]


def _prompt_logprob(tokenizer: Any, score: ScoredToken) -> dict[str, Any]:
    ranks = {score.id: score.rank} | {id_: rank for rank, (id_, _) in enumerate(score.top, start=1)}
    return {
        str(id_): {"logprob": value, "rank": ranks[id_], "decoded_token": tokenizer.decode([id_])}
        for id_, value in _sampled_first(score)
    }


def completion_logprobs(
    name: Callable[[int], str],
    scored: Sequence[tuple[int, ScoredToken | None]],
    count: int,
    first_offset: int,
) -> dict[str, Any]:
    """The logprobs object of `/v1/completions`.

    Args:
        name: what a token is called: its text, or `token_id:` and its id.
        scored: each token with its score, or None for one without: the first of an echoed prompt.
        count: how many of the most probable tokens are listed beside each token itself.
        first_offset: characters of the answer before these tokens.
    """
    names = [name(token) for token, _ in scored]
    ends = np.cumsum([first_offset, *map(len, names)]).tolist()
    return {
        "text_offset": ends[:-1],
        "token_logprobs": [score and score.logprob for _, score in scored],
        "tokens": names,
        "top_logprobs": [
            score and {name(id_): value for id_, value in _sampled_first(score)[: count + 1]}
            for _, score in scored
        ],
    }


def completion_response(
    name: str, model: str, version: str, choices: list[dict[str, Any]], counts: dict[str, int]
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
        "usage": _full_usage(counts),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def event(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
