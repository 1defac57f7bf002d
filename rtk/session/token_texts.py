"""Text and tokens of one model, as its server sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from rtk.client.generator import RemoteInferenceGenerator
from rtk.errors import PayloadError, PromptError
from rtk.session.prompts import PlainPrompt

# Enough to keep a server busy over a fast link, few enough not to crowd out its generate requests.
_CONCURRENT_LOOKUPS = 16


class TokenTexts:
    """Asks a server's `/tokenize` and `/detokenize`, and remembers how each single token reads."""

    def __init__(self, generator: RemoteInferenceGenerator, model: str) -> None:
        self._generator = generator
        self._model = model
        self._known: dict[int, str] = {}

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text, with whatever special tokens the model's tokenizer adds."""
        return await self._tokenize({"prompt": text})

    async def _tokenize(self, what: dict[str, Any]) -> list[int]:
        answer = await self._generator.request("POST", "/tokenize", {"model": self._model, **what})
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
            raise PayloadError(f"{self._generator.proxy_url}/tokenize answered without a list of tokens")
        return tokens

    async def encode_prompt(self, prompt: PlainPrompt) -> list[int]:
        """Token ids of a prompt in any form; the server applies its chat template to messages."""
        if isinstance(prompt, str):
            return await self.encode(prompt)
        if not prompt or not isinstance(prompt[0], dict):
            return prompt  # type: ignore[return-value]
        if (reason := self._generator.server.no_chat_prompts) is not None:
            raise PromptError(reason)
        return await self._tokenize({"messages": prompt})

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a run of tokens."""
        body = {"model": self._model, "tokens": [int(t) for t in token_ids]}
        answer = await self._generator.request("POST", "/detokenize", body)
        text = self._generator.server.detokenized(answer)
        if not isinstance(text, str):
            raise PayloadError(f"{self._generator.proxy_url}/detokenize answered without a text")
        return text

    async def each(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token alone; a token that is half of a character reads as U+FFFD."""
        await self._learn(set(token_ids) - self._known.keys())
        return [self._known[token] for token in token_ids]

    async def _learn(self, tokens: Iterable[int]) -> None:
        places = asyncio.Semaphore(_CONCURRENT_LOOKUPS)

        async def learn(token: int) -> None:
            async with places:
                self._known[token] = await self.decode([token])

        try:
            async with asyncio.TaskGroup() as group:
                for token in tokens:
                    group.create_task(learn(token))
        except ExceptionGroup as group_error:
            # One server gave all of these answers, so the first says what the others say.
            raise group_error.exceptions[0] from group_error
