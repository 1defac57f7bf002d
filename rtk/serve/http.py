"""How answers and errors leave the embedded server."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from rtk.serve.errors import ApiError, internal
from rtk.serve.responses import DONE, event

_log = logging.getLogger(__name__)


async def send_events(request: web.Request, events: AsyncIterator[dict[str, Any]]) -> web.StreamResponse:
    """Answer with server-sent events, and vLLM's last line."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    try:
        async for payload in events:
            await response.write(event(payload))
    except ConnectionError:
        raise
    except Exception as error:
        # The status is out already: a fault can only be told in the stream.
        _log.exception("%s failed in mid-stream", request.path)
        await response.write(event(internal(error).body))
    await response.write(DONE)
    return response


@web.middleware
async def errors_as_vllm(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give every error the form that vLLM gives it."""
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.body, status=error.status)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        return web.json_response({"detail": error.reason}, status=error.status)
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:
        _log.exception("%s failed", request.path)
        fault = internal(error)
        return web.json_response(fault.body, status=fault.status)
