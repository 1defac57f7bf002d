"""The servers that rtk speaks to, one file each. Nothing here does any I/O.

To add one: write its file, and name its class in SERVERS.
"""

import asyncio

from rtk.client.servers.completions import CompletionsOnly
from rtk.client.servers.embedded import Embedded
from rtk.client.servers.lookups import Lookups
from rtk.client.servers.route import Prompt, Route
from rtk.client.servers.server import Server
from rtk.client.servers.sglang import Sglang
from rtk.client.servers.skyrl import Skyrl
from rtk.client.servers.vllm import Vllm

__all__ = ["SERVERS", "Lookups", "Prompt", "Route", "Server", "by_name", "recognise"]

#: In the order in which they are recognised; the last takes what no other knows.
SERVERS: tuple[type[Server], ...] = (Skyrl, Embedded, Vllm, Sglang, CompletionsOnly)


def by_name(name: str) -> type[Server]:
    """The kind of server of that name. Raises ValueError where there is none."""
    for kind in SERVERS:
        if kind.name == name:
            return kind
    names = ", ".join(repr(kind.name) for kind in SERVERS)
    raise ValueError(f"server is {name!r}; it is one of {names}")


async def recognise(lookups: Lookups) -> Server:
    """What runs at an address, with what it says of itself.

    Raises:
        ServerUnreachable, ServerTimeout: there was no answer to a question.
    """
    found = await asyncio.gather(*(kind.find(lookups) for kind in SERVERS[:-1]))
    return next((server for server in found if server is not None), None) or await SERVERS[-1].of(lookups)
