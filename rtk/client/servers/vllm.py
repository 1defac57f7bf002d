"""vLLM, by its generate route from token ids to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rtk.client.servers.fields import Json
from rtk.client.servers.lookups import Lookups
from rtk.client.servers.openai_routes import Chat, Completions
from rtk.client.servers.route import Prompt, Route
from rtk.client.servers.server import Server
from rtk.client.servers.versions import at_least
from rtk.client.servers.vllm_answer import VllmAnswer
from rtk.layout.model_layout import ModelLayout


class VllmGenerate(VllmAnswer):
    """`/inference/v1/generate`, which vLLM 0.30 serves only with --enable-scale-out."""

    path = "/inference/v1/generate"
    features = True
    start_offset = False

    def advice(self, status: int, said: str) -> str:
        if status == 404:
            return (
                "If the path is unknown there, start vLLM with --enable-scale-out, which serves it; "
                "if the model is, see the names in /v1/models"
            )
        if status == 403 and is_switched_off(said):
            return "Or sample by its OpenAI routes, with server='completions'"
        return super().advice(status, said)

    def body(
        self, prompt: Prompt, sampling_params: Json, *, routed_experts: bool, start: int = 0
    ) -> dict[str, Any]:
        params = {**sampling_params, **({"routed_experts_prompt_start": start} if start else {})}
        return {"sampling_params": params, "token_ids": list(prompt)}


def is_switched_off(said: str) -> bool:
    """Whether a 403 is what vLLM 0.32 and newer answer without --enable-scale-out, and not about a key."""
    return "--enable-scale-out" in said


class Vllm(Server):
    """vLLM, and whatever speaks its HTTP."""

    name = "vllm"

    @property
    def product(self) -> str:
        return "vLLM" if self.owner in (None, "vllm") else "unknown"

    @classmethod
    async def is_there(cls, lookups: Lookups) -> bool:
        if not await lookups.posts(VllmGenerate.path):
            return False
        # From 0.32 on the path is there without --enable-scale-out as well, and refuses whatever is posted.
        refusal = await lookups.refusal_of_nothing(VllmGenerate.path)
        return refusal is None or not is_switched_off(str(refusal))

    def generate(self, layout: ModelLayout | None, *, routed_experts: bool) -> Route:
        return VllmGenerate()

    def chat(self, layout: ModelLayout | None) -> Route:
        return Chat()

    def routes(self, layout: ModelLayout | None) -> Sequence[Route]:
        return VllmGenerate(), Completions(), Chat()

    def enable_routes(self) -> str:
        if self.product == "vLLM" and not at_least(self.version, "0.22"):
            return "vLLM sends them from 0.22 on; update it, and start it with --enable-return-routed-experts"
        return (
            "start vLLM with --enable-return-routed-experts (and --enable-scale-out); a model without MoE layers "
            "has none, and a SkyRL server has them under server='skyrl' alone"
        )

    def not_served(self, route: Route, status: int, said: str) -> str | None:
        # 0.30 answers 404 without the flag, 0.32 and newer a 403 that names it.
        missing = status == 404 and at_least(self.version, "0.30")
        if route.path == VllmGenerate.path and (missing or (status == 403 and is_switched_off(said))):
            return "start vLLM with --enable-scale-out"
        return super().not_served(route, status, said)
