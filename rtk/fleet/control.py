"""Control over every inference server of a fleet: one call, all servers, one answer or one error."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

import aiohttp

from rtk.client.transport import RetryPolicy
from rtk.errors import FanOutError, PayloadError
from rtk.fleet.fan_out import call, field, settle

T = TypeVar("T")

PauseMode = Literal["abort", "keep", "wait"]
_PAUSE_MODES = ("abort", "keep", "wait")
_HEALTH_TIMEOUT_S = 5.0
_ONCE = RetryPolicy(tries=1)


class ControlPlane:
    """The half of RemoteInferenceClient that speaks to the servers; see there for what the arguments are."""

    def __init__(
        self,
        server_urls: Sequence[str],
        *,
        data_parallel_size: int,
        control_timeout_s: float | None,
        control_retry: RetryPolicy,
    ) -> None:
        self.server_urls = _addresses(server_urls)
        if data_parallel_size < 1 or len(self.server_urls) % data_parallel_size:
            raise ValueError(
                f"data_parallel_size is {data_parallel_size}; the {len(self.server_urls)} servers do not divide "
                "into deployments of that many"
            )
        self.data_parallel_size = data_parallel_size
        self.control_timeout_s = control_timeout_s
        self.control_retry = control_retry

    def _http(self) -> aiohttp.ClientSession:
        """The HTTP session of the running loop."""
        raise NotImplementedError

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False) -> dict[str, Any]:
        """Stop generating on every server; new requests wait until `resume`.

        Args:
            mode: what becomes of running requests. "keep" freezes them and `resume` goes on with them, "abort"
                ends them with the tokens so far and the finish reason "abort", "wait" lets them finish first.
            clear_cache: whether to empty the KV and prefix caches as well; "keep" never does.
        """
        if mode not in _PAUSE_MODES:
            raise ValueError(f"mode is {mode!r}; it is one of {', '.join(map(repr, _PAUSE_MODES))}")
        params = {"mode": mode, "clear_cache": str(clear_cache).lower()}
        return await self._set_all("/pause", params=params)

    async def resume(self) -> dict[str, Any]:
        """Generate again, on every server."""
        return await self._set_all("/resume")

    async def is_paused(self) -> dict[str, bool]:
        """Whether each server is paused."""
        return await self._ask_all("/is_paused", "is_paused", bool)

    async def sleep(self, level: Literal[0, 1, 2] = 2) -> dict[str, Any]:
        """Free the memory of every server's accelerators; needs vLLM's --enable-sleep-mode.

        Running requests are aborted, and new ones wait for `wake_up`; `pause("wait")` first lets them finish.

        Args:
            level: 0 frees nothing. 1 keeps a copy of the weights in main memory. 2, which is SkyRL's default, drops them: after
                `wake_up` they have to be sent again, and until then the server generates nonsense.
        """
        return await self._set_all("/sleep", params={"level": str(int(level))})

    async def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Take the memory back, on every server, and generate again once all of it is back.

        Args:
            tags: what to wake: "weights", "kv_cache" or both; None wakes everything. It ends a `pause` too.
        """
        if isinstance(tags, str):
            raise ValueError(f"tags is one string; write [{tags!r}]")
        return await self._set_all("/wake_up", params={"tags": list(tags)} if tags else None)

    async def is_sleeping(self) -> dict[str, bool]:
        """Whether each server sleeps; vLLM 0.30 says so of a paused one too."""
        return await self._ask_all("/is_sleeping", "is_sleeping", bool)

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> dict[str, Any]:
        """Empty every server's prefix cache; needed after new weights.

        vLLM refuses with `success: false` while requests hold blocks, and that counts as a failure here.

        Args:
            reset_running_requests: whether running requests give their blocks up and start again.
        """
        params = {"reset_running_requests": str(reset_running_requests).lower()}
        return await self._set_all("/reset_prefix_cache", params=params)

    async def get_weight_version(self) -> dict[str, str]:
        """The version that each server gives its weights; servers that differ generate with other weights."""
        return await self._ask_all("/weight_info", "weight_version", str)

    async def update_weight_version(self, new_version: str | int) -> dict[str, Any]:
        """Tell every server the version of the weights it has; the weights themselves stay as they are."""
        return await self._set_all("/update_weight_version", {"new_version": str(new_version)})

    async def load_lora_adapter(
        self, lora_name: str, lora_path: str, *, load_inplace: bool = False
    ) -> dict[str, Any]:
        """Load an adapter on every server; then `model=lora_name` generates with it.

        Args:
            lora_name: the name to give it.
            lora_path: its folder, on the servers' disks.
            load_inplace: whether an adapter that already has the name is replaced; else the server refuses.
        """
        body = {"lora_name": lora_name, "lora_path": lora_path, "load_inplace": load_inplace}
        return await self.call_all_servers("POST", "/v1/load_lora_adapter", body)

    async def unload_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        """Unload an adapter on every server."""
        body = {"lora_name": lora_name}
        return await self.call_all_servers("POST", "/v1/unload_lora_adapter", body)

    async def get_server_info(self) -> dict[str, dict[str, Any]]:
        """Configuration, environment and system of each server, as vLLM reports them."""
        params = {"config_format": "json"}
        return await self.call_all_servers("GET", "/server_info", params=params, retry=self.control_retry)

    async def get_world_size(self) -> tuple[int, int]:
        """How many workers (one an accelerator) there are in all, and in one deployment.

        Raises:
            FanOutError: as every control call.
            PayloadError: the servers do not agree.
        """
        sizes = await self._ask_all("/get_world_size", "world_size", int)
        size = next(iter(sizes.values()))
        if len(set(sizes.values())) > 1:
            raise PayloadError(
                f"the servers' world sizes differ, so one of them is set up otherwise: {sizes}"
            )
        return size * (len(self.server_urls) // self.data_parallel_size), size

    async def health(self) -> dict[str, Exception | None]:
        """Each server's health: None where it is well, and what is wrong where it is not. Asks once, for 5 s."""
        _, failures = await settle(
            {
                url: self._call(url, "GET", "/health", retry=_ONCE, timeout_s=_HEALTH_TIMEOUT_S)
                for url in self.server_urls
            }
        )
        return {url: failures.get(url) for url in self.server_urls}

    async def call_all_servers(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        retry: RetryPolicy = _ONCE,
    ) -> dict[str, Any]:
        """The same request to every server, for the endpoints that have no method here.

        Args:
            method: "GET" or "POST".
            path: of the endpoint, for example "/collective_rpc".
            body: sent as JSON.
            params: the query's parameters; a list is sent as several of that name.
            retry: when it is sent again; by default never, since not every endpoint may be called twice.

        Returns:
            Each server's answer by its address: a JSON value, a text, or None where it is empty.

        Raises:
            FanOutError: some servers failed. All the others were left to finish.
        """
        return await self._fan_out(
            f"{method} {path}",
            {
                url: self._call(url, method, path, body, params=params, retry=retry)
                for url in self.server_urls
            },
        )

    async def _set_all(
        self, path: str, body: Mapping[str, Any] | None = None, *, params: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """A POST that sets a state, and so may be sent again."""
        return await self.call_all_servers("POST", path, body, params=params, retry=self.control_retry)

    async def _ask_all(self, path: str, key: str, kind: type[T]) -> dict[str, T]:
        """`key` of each server's answer; an answer without it counts as that server's failure."""

        async def one(url: str) -> T:
            return field(await self._call(url, "GET", path, retry=self.control_retry), key, kind, url + path)

        return await self._fan_out(f"GET {path}", {url: one(url) for url in self.server_urls})

    async def _fan_out(self, name: str, calls: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T]:
        answers, failures = await settle(calls)
        if failures:
            raise FanOutError(name, failures, answers)
        return answers

    async def _call(
        self,
        url: str,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        retry: RetryPolicy,
        params: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        timeout_s = self.control_timeout_s if timeout_s is None else timeout_s
        return await call(
            self._http(), method, url + path, body=body, params=params, timeout_s=timeout_s, retry=retry
        )


def _addresses(server_urls: Sequence[str]) -> tuple[str, ...]:
    if isinstance(server_urls, str):
        raise ValueError(f"server_urls is one string; write [{server_urls!r}]")
    urls = tuple(url.rstrip("/") for url in server_urls)
    if not urls:
        raise ValueError("server_urls is empty; leave it out where the proxy is the only server")
    if twice := sorted({url for url in urls if urls.count(url) > 1}):
        raise ValueError(f"server_urls names {', '.join(twice)} more than once")
    return urls
