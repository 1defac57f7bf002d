"""SkyRL's inference endpoint (PR #1909), which stands in front of vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from rtk.client.servers.lookups import Lookups
from rtk.client.servers.openai_routes import Chat, Completions
from rtk.client.servers.route import Route
from rtk.client.servers.vllm import Vllm, VllmGenerate
from rtk.layout.model_layout import ModelLayout


class SkyrlGenerate(VllmGenerate):
    """`/skyrl/v1/generate`: vLLM's generate route, with the routes as `{data, shape, dtype}`.

    It ignores `stream`, and gives back the first sequence only (read in SkyRL 0.4.0).
    """

    path = "/skyrl/v1/generate"
    streams = False
    streams_routes = False
    several = False
    features = False

    def advice(self, status: int, said: str) -> str:
        if status == 404:
            return "The server is no SkyRL server: use server='vllm'"
        return super().advice(status, said)


class Skyrl(Vllm):
    """SkyRL: its own endpoint where routes are wanted, as its own client asks it, and vLLM's otherwise."""

    name = "skyrl"

    @property
    def product(self) -> str:
        return "vLLM"

    @property
    def title(self) -> str:
        return f"SkyRL, in front of vLLM {self.version}"

    @classmethod
    async def is_there(cls, lookups: Lookups) -> bool:
        return await lookups.posts(SkyrlGenerate.path)

    def generate(self, layout: ModelLayout | None, *, routed_experts: bool) -> Route:
        return SkyrlGenerate() if routed_experts else VllmGenerate()

    def routes(self, layout: ModelLayout | None) -> Sequence[Route]:
        return SkyrlGenerate(), Completions(), Chat()
