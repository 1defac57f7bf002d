"""A server that is sampled by the OpenAI routes alone: a vLLM without --enable-scale-out, above all."""

from __future__ import annotations

from rtk.client.servers.lookups import Lookups
from rtk.client.servers.openai_routes import Completions
from rtk.client.servers.route import Route
from rtk.client.servers.vllm import Vllm
from rtk.layout.model_layout import ModelLayout


class CompletionsOnly(Vllm):
    """Asked by `/v1/completions`. Its `routes` still name vLLM's own: that one is missing is worth a word."""

    name = "completions"

    @classmethod
    async def is_there(cls, lookups: Lookups) -> bool:
        return await lookups.posts(Completions.path)

    def generate(self, layout: ModelLayout | None, *, routed_experts: bool) -> Route:
        return Completions()
