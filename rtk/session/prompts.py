"""The forms in which a prompt may be given: text, token ids, chat messages."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rtk.errors import PromptError

#: One message of a chat, in OpenAI's form: {"role": ..., "content": ...}.
Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
#: A prompt of plain JSON values.
PlainPrompt = str | list[int] | list[dict[str, Any]]

_FORMS = 'a text, a list of token ids, or a list of chat messages such as {"role": "user", "content": "..."}'


def plain(prompt: Prompt, index: int | None = None) -> PlainPrompt:
    """A prompt as plain JSON values; whole numbers of numpy and torch become Python's.

    Args:
        prompt: what the user gave.
        index: its place among several, for the error.

    Raises:
        PromptError: it has none of the three forms.
    """
    name = "the prompt" if index is None else f"prompt {index}"
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"{name} is no text that UTF-8 can write: {error}", index=index) from error
        return prompt
    if isinstance(prompt, Mapping | bytes) or not isinstance(prompt, Iterable):
        raise PromptError(f"{name} is a {type(prompt).__name__}; it must be {_FORMS}", index=index)
    items: list[Any] = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        return [_message(item, f"message {place} of {name}", index) for place, item in enumerate(items)]
    try:
        # Not int(), which would cut 1.5 down to 1.
        return [operator.index(item) for item in items]
    except TypeError as error:
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise PromptError(f"{name} is a list of {kinds}; it must be {_FORMS}", index=index) from error


def plain_list(prompts: Iterable[Prompt]) -> list[PlainPrompt]:
    """Several prompts as plain JSON values.

    Raises:
        PromptError: one has none of the three forms, or a single prompt was given where a list of them belongs.
    """
    if isinstance(prompts, str | Mapping):
        raise PromptError(
            f"sample_many takes a list of prompts, not a single {type(prompts).__name__}; put it into a list"
        )
    return [plain(prompt, index) for index, prompt in enumerate(prompts)]


def digest(*asked: Any) -> str:
    """What one sample was asked for, as 32 hexadecimal digits: equal for equal JSON values."""
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _message(message: Message, name: str, index: int | None) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise PromptError(
            f'{name} has no "role": it must be like {{"role": "user", "content": "..."}}', index=index
        )
    try:
        return json.loads(json.dumps(dict(message)))  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise PromptError(f"{name} holds what is no JSON value: {error}", index=index) from error
