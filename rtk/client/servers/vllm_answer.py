"""The form of answer that vLLM's generate, completions and chat routes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rtk.client import routed_experts as wire
from rtk.client.result import GenerateChunk, WeightVersionSpan
from rtk.client.servers.fields import Alternatives, Json, all_floored, floored, short, token_ids
from rtk.client.servers.route import Route
from rtk.errors import PayloadError

# What vLLM 0.34 answers while it is paused by "abort" or "wait"; older ones let requests wait.
_PAUSED = "Generation is paused"


class VllmAnswer(Route):
    """An answer in choices, as all of vLLM's routes give it; they differ in where logprobs stand.

    vLLM 0.22 and newer send one array; 0.21 sends the prompt's rows apart, as `prompt_routed_experts` of the
    answer, before the generated tokens' rows in the choice. Joined in this order they are the one array.
    """

    def advice(self, status: int, said: str) -> str:
        if status == 503 and _PAUSED in said:
            return "The server is paused: resume it, by POST /resume or RemoteInferenceClient.resume()"
        return super().advice(status, said)

    def choices(self, payload: Json) -> Sequence[Json]:
        choices = payload.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise PayloadError(f"the answer has no choices, but the keys {sorted(map(str, payload))}")
        return choices

    def chunk(self, choice: Json) -> GenerateChunk:
        tokens = token_ids(choice.get("token_ids"))
        logprobs = choice.get("logprobs")
        if logprobs is None:
            return GenerateChunk(tokens, None)
        values = self._logprobs(logprobs) if isinstance(logprobs, Mapping) else None
        if values is None or len(values) != len(tokens):
            raise PayloadError(f"logprobs of the answer are {short(logprobs)} for {len(tokens)} tokens")
        return GenerateChunk(tokens, all_floored(values))

    def _logprobs(self, logprobs: Json) -> list[object] | None:
        """What the choice's logprobs object says of each token; None where it is of another form."""
        content = logprobs.get("content")
        if not isinstance(content, list):
            return None
        try:
            return [entry["logprob"] for entry in content]
        except (KeyError, TypeError):  # some token has none
            return [entry.get("logprob") if isinstance(entry, dict) else None for entry in content]

    def top_logprobs(self, choice: Json) -> Alternatives:
        content = (choice.get("logprobs") or {}).get("content")
        if not isinstance(content, list):
            raise PayloadError(
                f"top logprobs were asked for, and logprobs are {short(choice.get('logprobs'))}"
            )
        try:
            return [
                {_token_of(entry): floored(entry["logprob"]) for entry in token["top_logprobs"]}
                for token in content
            ]
        except (KeyError, TypeError) as error:
            raise PayloadError(
                f"top_logprobs are {short(content)}; objects of token and logprob are expected"
            ) from error

    def prompt_logprobs(self, payload: Json, choice: Json) -> Alternatives | None:
        entries = payload.get("prompt_logprobs")
        if entries is None:
            entries = choice.get("prompt_logprobs")
        if entries is None:
            return None
        try:
            return [
                {int(token): floored(value["logprob"]) for token, value in (entry or {}).items()}
                for entry in entries
            ]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PayloadError(
                f"prompt_logprobs are {short(entries)}; objects of token ids and their logprobs are expected"
            ) from error

    def prompt_token_ids(self, payload: Json, choice: Json) -> list[int] | None:
        tokens = payload.get("prompt_token_ids") or choice.get("prompt_token_ids")
        return None if tokens is None else token_ids(tokens)

    def finish_reason(self, choice: Json) -> str | None:
        reason = choice.get("finish_reason")
        return None if reason is None else str(reason)

    def stop_match(self, choice: Json) -> str | int | None:
        match = choice.get("stop_reason")
        return match if isinstance(match, str | int) else None

    def weight_versions(self, choice: Json) -> list[WeightVersionSpan] | None:
        spans = choice.get("weight_versions")
        if spans is None:
            return None
        try:
            found = [WeightVersionSpan(span["version"], span["start"], span["end"]) for span in spans]
        except (KeyError, TypeError):
            found = []
        if len(found) != len(spans) or not all(
            isinstance(span.version, str) and type(span.start) is type(span.end) is int for span in found
        ):
            raise PayloadError(
                f"weight_versions are {short(spans)}; objects of a version and the whole numbers start and end are "
                "expected"
            )
        return found

    def request_id(self, payload: Json) -> str | None:
        return payload.get("request_id") or payload.get("id")

    def routed_experts(self, payload: Json, choice: Json) -> wire.Routes | None:
        of_choice, of_prompt = choice.get("routed_experts"), payload.get("prompt_routed_experts")
        if of_prompt is None:
            return None if of_choice is None else wire.decode(of_choice)
        # A single generated token was never forwarded, so there is nothing beside the prompt's rows.
        parts = [wire.decode(part) for part in (of_prompt, of_choice) if part not in (None, [])]
        return wire.join(parts)


def _token_of(entry: Json) -> int:
    """The token of an alternative: `token_id` from vLLM 0.32 on, before that `token`, which is "token_id:17"."""
    if "token_id" not in entry:
        return named_token(entry["token"])
    (token,) = token_ids([entry["token_id"]])
    return token


def named_token(token: object) -> int:
    """The id in vLLM's name for a token, `token_id:17`."""
    digits = token.removeprefix("token_id:") if isinstance(token, str) else ""
    if not digits.isdecimal() or digits == token:
        raise PayloadError(f"a logprob is of the token {short(token)}; 'token_id:' and the id are expected")
    return int(digits)
