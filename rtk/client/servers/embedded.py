"""rtk's own embedded server, which speaks vLLM's HTTP."""

from __future__ import annotations

from rtk.client.servers.lookups import Lookups
from rtk.client.servers.vllm import Vllm


class Embedded(Vllm):
    """A vLLM in all but its name and its options."""

    name = "embedded"

    @property
    def product(self) -> str:
        return "embedded"

    @property
    def title(self) -> str:
        return f"rtk's embedded server, {self.version}"

    @classmethod
    async def is_there(cls, lookups: Lookups) -> bool:
        return "+rtk.embedded" in await lookups.version()

    def enable_routes(self) -> str:
        return "start the embedded server without --no-routed-experts"
