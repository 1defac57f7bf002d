"""From an address to a session: what runs there, which model, and what its layers are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rtk import loops
from rtk.client.generator import RemoteInferenceGenerator
from rtk.client.servers import Lookups, Server, by_name, recognise
from rtk.client.transport import RetryPolicy, Timeouts, Verify
from rtk.errors import PayloadError, UnknownModel
from rtk.layout.model_layout import ModelLayout
from rtk.session.session import Session

# A notebook user who mistyped the port wants to know now, not after half a minute of retries.
_ASK_ONCE = RetryPolicy(tries=1)
_ASK_TIMEOUTS = Timeouts(connect_s=20.0, total_s=20.0)
_SAMPLE_RETRY = RetryPolicy(tries=5)


def connect(
    url: str,
    *,
    model: str | None = None,
    layout: ModelLayout | None = None,
    server: str | Server | None = None,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
    retry: RetryPolicy = _SAMPLE_RETRY,
    timeouts: Timeouts = Timeouts(),
    verify: Verify = True,
    http_proxy: str | None = None,
) -> Session:
    """Connect to a running server, asking it at once for its version and models.

    Args:
        url: the server's address, for example "http://127.0.0.1:8000".
        model: the model's name there; may be left out where the server has only one.
        layout: the model's layers and routers. Left out, it is read from the model's config where the
            server names a folder that this machine can read.
        server: see `RemoteInferenceGenerator`. Left out, each kind in `rtk.client.servers` is asked in turn whether
            what runs there is one of its own; what none knows is sampled by the OpenAI completions.
        api_key, headers, retry, timeouts, verify, http_proxy: as for `RemoteInferenceGenerator`; retry and
            timeouts count for sampling. Connecting asks once, and waits 20 s for each answer.

    Raises:
        ServerUnreachable: nothing answers there; ServerTimeout where something listens and does not answer.
        RequestRejected, ServerFailed, PayloadError: what answers is no inference server, or refuses.
        UnknownModel: the server does not have that model, or has several and none was named.
        LayoutError: the model's config is unreadable, or is of a model without experts.
    """
    generator = RemoteInferenceGenerator(
        url,
        model,
        api_key=api_key,
        headers=headers,
        retry=retry,
        timeouts=timeouts,
        verify=verify,
        http_proxy=http_proxy,
    )
    return loops.background.run(_connect(generator, layout, server))


async def _connect(
    generator: RemoteInferenceGenerator, layout: ModelLayout | None, server: str | Server | None
) -> Session:
    try:
        models = await _ask(generator, "GET", "/v1/models")
        card = _choose_model(models, generator.model_name, generator.proxy_url)
        lookups = Lookups(partial(_ask, generator), card)
        if isinstance(server, Server):
            generator.server = server
        else:
            kind = None if server is None else by_name(server)
            generator.server = await (recognise(lookups) if kind is None else kind.of(lookups))
    except BaseException:
        await generator.aclose()
        raise
    generator.model_name = card["id"]
    generator.layout = layout or _layout_of(card)
    max_model_len = card.get("max_model_len")
    return Session(
        generator,
        model=card["id"],
        server_version=generator.server.version,
        root=card["root"] if isinstance(card.get("root"), str) else None,
        max_model_len=max_model_len if isinstance(max_model_len, int) else None,
        layout=generator.layout,
    )


async def _ask(
    generator: RemoteInferenceGenerator, method: str, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return await generator.request(method, path, body, retry=_ASK_ONCE, timeouts=_ASK_TIMEOUTS)


def _choose_model(models: Mapping[str, Any], wanted: str | None, url: str) -> Mapping[str, Any]:
    data = models.get("data")
    cards = [c for c in data if isinstance(c, dict) and "id" in c] if isinstance(data, list) else []
    if not cards:
        raise PayloadError(f"{url}/v1/models names no models; is this an inference server?")
    names = ", ".join(repr(card["id"]) for card in cards)
    if wanted is None:
        if len(cards) > 1:
            raise UnknownModel(f"{url} serves {names}; choose one with model=...", url=url)
        return cards[0]
    for card in cards:
        if card["id"] == wanted:
            return card
    raise UnknownModel(f"{url} has no model {wanted!r}; it serves {names}", url=url)


def _layout_of(card: Mapping[str, Any]) -> ModelLayout | None:
    root = card.get("root")
    if not isinstance(root, str) or not (Path(root) / "config.json").is_file():
        return None  # a hub name, or a folder of the server's own machine
    return ModelLayout.from_config(root)
