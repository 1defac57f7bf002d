"""Takes in bodies of any size that is allowed, in one copy: routes of a long sequence are tens of megabytes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp

from rtk.client import routed_experts
from rtk.errors import PayloadError

# The routes of one sequence and what comes with them, in one body or on one line of a stream.
MAX_BODY_BYTES = routed_experts.MAX_ROUTES_BYTES // 3 * 4 + 2**20
_SMALL = 2**18


async def body(response: aiohttp.ClientResponse) -> bytes | bytearray:
    """The whole body.

    Raises:
        PayloadError: it is larger than MAX_BODY_BYTES.
        aiohttp.ClientError: it was cut.
    """
    if (response.content_length or _SMALL) < _SMALL and "Content-Encoding" not in response.headers:
        return await response.read()
    # `read` keeps the pieces and joins them, which takes twice the room; a growing bytearray is moved, not copied.
    whole = bytearray()
    async for block in response.content.iter_any():
        whole += block
        if len(whole) > MAX_BODY_BYTES:
            raise PayloadError(f"{response.url}: the answer is larger than {MAX_BODY_BYTES} bytes")
    return whole


async def lines(content: aiohttp.StreamReader) -> AsyncIterator[bytearray]:
    """Lines of any length, the caller's to change; aiohttp's own line iterator gives up past 128 KiB.

    Raises:
        PayloadError: a line is longer than MAX_BODY_BYTES.
        aiohttp.ClientError: the body was cut.
    """
    line = bytearray()
    async for block in content.iter_any():
        start = 0
        while (end := block.find(b"\n", start)) >= 0:
            line += block[start:end]
            yield line
            line = bytearray()
            start = end + 1
        line += block[start:]
        if len(line) > MAX_BODY_BYTES:
            raise PayloadError(f"a line of the stream is longer than {MAX_BODY_BYTES} bytes")
