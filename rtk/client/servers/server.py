"""One kind of inference server: all that is peculiar to it, in one object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from rtk.client.servers.fields import Json
from rtk.client.servers.lookups import Lookups
from rtk.client.servers.route import Route
from rtk.layout.model_layout import ModelLayout


@dataclass(frozen=True)
class Server(ABC):
    """A kind of server, and what a running one says of itself. Whoever needs to know asks here, by no name.

    Attributes:
        name: what `server=` calls this kind.
        version: of the running server; "unknown" where it was not asked or does not say.
        owner: `owned_by` of its models; None where it was not asked or does not say.
    """

    name: ClassVar[str]
    version: str = "unknown"
    owner: str | None = None

    @property
    @abstractmethod
    def product(self) -> str:
        """Its name in the table of known faults; "unknown" where no product can be told."""

    @property
    def title(self) -> str:
        """Product and version, for a reader."""
        return f"{self.product} {self.version}"

    @classmethod
    async def find(cls, lookups: Lookups) -> Self | None:
        """This kind, where it is what runs there."""
        return await cls.of(lookups) if await cls.is_there(lookups) else None

    @classmethod
    async def of(cls, lookups: Lookups) -> Self:
        """This kind, with what the running server says of itself."""
        return cls(await cls.running_version(lookups), lookups.owner)

    @classmethod
    @abstractmethod
    async def is_there(cls, lookups: Lookups) -> bool:
        """Whether what runs there is of this kind."""

    @classmethod
    async def running_version(cls, lookups: Lookups) -> str:
        """The version that the running server names."""
        return await lookups.version()

    @abstractmethod
    def generate(self, layout: ModelLayout | None, *, routed_experts: bool) -> Route:
        """The route from token ids to token ids.

        Raises:
            LayoutError: its routes cannot be read without the model's layout.
        """

    @abstractmethod
    def chat(self, layout: ModelLayout | None) -> Route:
        """The route from a chat's messages.

        Raises:
            ValueError: it has none that names its tokens.
        """

    @abstractmethod
    def routes(self, layout: ModelLayout | None) -> Sequence[Route]:
        """Each route that may carry routed experts, the one that is best sampled from first."""

    @abstractmethod
    def enable_routes(self) -> str:
        """What to do where answers come without routed experts, as a sentence without its full stop."""

    def not_served(self, route: Route, status: int, said: str) -> str | None:
        """What to do where a refusal means that a route of `routes` is not there; None where it means something else.

        Args:
            route: what was asked.
            status: the HTTP status of the refusal.
            said: the server's own words.
        """
        if status not in (404, 405):
            return None
        return "this server may be of another kind, or a proxy does not pass it on"

    @property
    def no_chat_prompts(self) -> str | None:
        """Why `/tokenize` takes no chat messages, and what to do instead; None where it takes them."""
        return None

    def detokenized(self, answer: Json) -> object:
        """The text in an answer of `/detokenize`."""
        return answer.get("prompt")
