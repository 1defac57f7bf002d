"""Generation through a proxy, and control over every server behind it."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

from rtk._fan_out import LoopCap, call, settle
from rtk.errors import BatchError, FanOutError, PayloadError
from rtk.generator import RemoteInferenceGenerator, RetryPolicy
from rtk.result import RemoteGenerateResult

T = TypeVar("T")

PauseMode = Literal["abort", "keep", "wait"]
_PAUSE_MODES = ("abort", "keep", "wait")
_HEALTH_TIMEOUT_S = 5.0
# Loading an adapter again is refused unless it was asked for, so this is sent once.
_ONCE = RetryPolicy(tries=1)
_BATCH_KEYS = ("prompt_token_ids", "sampling_params", "session_ids", "mm_features", "cache_salt")


class RemoteInferenceClient:
    """What SkyRL's client of the same name does, for any event loop: generate through one address, control all.

    Data (`generate`, `tokenize`, ...) goes to the proxy, which picks a server. Control (`pause`, `sleep`, ...)
    goes to every server itself, all at once. Each control method returns the servers' answers by address. Where
    some fail it raises one FanOutError that names them with their reasons, after all have answered or failed.

    Every method may be awaited from any event loop: HTTP session and caps belong to the loop that runs. A
    client pickles without them. The endpoints are vLLM 0.30's; its control ones exist only where the server was
    started with VLLM_SERVER_DEV_MODE=1, the LoRA ones with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.

    Args:
        proxy_url: base address of the proxy, or of the only server.
        server_urls: base address of each server; left out, the proxy is the only one.
        model_name: sent as `model`; None lets the server use its only one.
        data_parallel_size: how many of server_urls form one deployment; only `get_world_size` counts with it.
        concurrency_per_server: how many generate requests, and apart from them how many tokenize requests,
            are in flight at once for each server, on each event loop; None for no cap. 512 is SkyRL's.
        control_timeout_s: seconds that a server has for a control call, the waiting of `pause("wait")` included;
            None waits forever.
        control_retry: when a control call is sent again: where there was no connection, or it was dropped.
            All but LoRA's may be repeated, since each sets a state and does not change it step by step.
        generator: everything else is the RemoteInferenceGenerator's, for example headers=... or retry=....

    Raises:
        ValueError: server_urls is empty, one string, or names a server twice; or a number makes no sense.
    """

    def __init__(
        self,
        proxy_url: str,
        server_urls: Sequence[str] | None = None,
        model_name: str | None = None,
        *,
        data_parallel_size: int = 1,
        concurrency_per_server: int | None = 512,
        control_timeout_s: float | None = 600.0,
        control_retry: RetryPolicy = RetryPolicy(tries=3),
        **generator: Any,
    ) -> None:
        self.proxy_url = proxy_url.rstrip("/")
        self.server_urls = _addresses([proxy_url] if server_urls is None else server_urls)
        if data_parallel_size < 1 or len(self.server_urls) % data_parallel_size:
            raise ValueError(
                f"data_parallel_size is {data_parallel_size}; the {len(self.server_urls)} servers do not divide "
                "into deployments of that many"
            )
        self.model_name = model_name
        self.data_parallel_size = data_parallel_size
        self.control_timeout_s = control_timeout_s
        self.control_retry = control_retry
        limit = None if concurrency_per_server is None else concurrency_per_server * len(self.server_urls)
        self._generate_cap = LoopCap(limit)
        # Apart, so that short tokenize calls do not wait behind long generations.
        self._tokenize_cap = LoopCap(limit)
        self._generator_options = generator
        self._generator: RemoteInferenceGenerator | None = self._new_generator()

    # Data plane: one request, to the proxy.

    @property
    def generator(self) -> RemoteInferenceGenerator:
        """The generator for the proxy; it holds the HTTP session. Made again after unpickling."""
        if self._generator is None:
            self._generator = self._new_generator()
        return self._generator

    async def generate_single(
        self, token_ids: Sequence[int], sampling_params: Mapping[str, Any], **options: Any
    ) -> RemoteGenerateResult:
        """Generate one sequence, when the cap has room. Arguments, result and errors are those of
        `RemoteInferenceGenerator.generate`; model="name of an adapter" asks a loaded LoRA adapter."""
        return await self._generate_cap.run(self.generator.generate(token_ids, sampling_params, **options))

    async def generate(
        self, input_batch: Mapping[str, Any], *, model: str | None = None, routed_experts: bool = False
    ) -> dict[str, Any]:
        """Generate one sequence for each prompt of a batch, in the form of SkyRL's `generate(input_batch)`.

        Args:
            input_batch: `prompt_token_ids`, a list of token-id lists; and where wanted `sampling_params` for all
                of them, `session_ids` and `mm_features` with one entry a prompt, `cache_salt` for all.
            model: for this batch, instead of model_name; for example the name of a loaded LoRA adapter.
            routed_experts: whether routes must come back.

        Returns:
            Lists in the order of the prompts: `response_ids` (token ids), `responses` (their text),
            `stop_reasons`, `response_logprobs` (None unless sampling_params asks for logprobs) and
            `rollout_expert_indices` (None, or arrays of shape [tokens - 1, layers, top-k] as they were sent).

        Raises:
            ValueError: the batch has keys that are not known, lists of different lengths, or n > 1.
            BatchError: some prompts failed. It says which and why, and holds what the others generated.
        """
        prompts, params = _batch(input_batch)
        session_ids = input_batch.get("session_ids") or [None] * len(prompts)
        features = input_batch.get("mm_features") or [None] * len(prompts)
        options = {
            "cache_salt": input_batch.get("cache_salt"), "model": model, "routed_experts": routed_experts,
        }  # fmt: skip
        results, failures = await settle(
            {
                place: self.generate_single(
                    prompt,
                    params,
                    session_id=None if session_ids[place] is None else str(session_ids[place]),
                    features=features[place],
                    **options,
                )
                for place, prompt in enumerate(prompts)
            }
        )
        if failures:
            raise BatchError(failures, results)
        texts = await self.detokenize([result.token_ids for result in results.values()])
        with_logprobs = params.get("logprobs") is not None
        return {
            "responses": texts,
            "response_ids": [r.token_ids for r in results.values()],
            "stop_reasons": [r.stop_reason for r in results.values()],
            "response_logprobs": [r.logprobs for r in results.values()] if with_logprobs else None,
            "rollout_expert_indices": [r.routed_experts for r in results.values()]
            if routed_experts
            else None,
        }

    async def completion(self, body: Mapping[str, Any], *, session_id: str | None = None) -> dict[str, Any]:
        """One `/v1/completions` request, not streamed; returns the server's JSON."""
        return await self._generate_cap.run(self._post("/v1/completions", body, session_id))

    async def chat_completion(
        self, body: Mapping[str, Any], *, session_id: str | None = None
    ) -> dict[str, Any]:
        """One `/v1/chat/completions` request, not streamed; returns the server's JSON."""
        return await self._generate_cap.run(self._post("/v1/chat/completions", body, session_id))

    async def render_chat_completion(
        self, body: Mapping[str, Any], *, session_id: str | None = None
    ) -> dict[str, Any]:
        """Apply the chat template and tokenize, without generating; needs vLLM's --enable-scale-out.

        Args:
            body: an OpenAI chat request: `messages`, `tools`, `chat_template_kwargs`, sampling parameters, ...
            session_id: sent as X-Session-ID.

        Returns:
            The request that `/inference/v1/generate` would take: `token_ids`, `sampling_params`, and `features`
            for multi-modal messages.
        """
        path = "/v1/chat/completions/render"
        answer = await self._generate_cap.run(self._post(path, body, session_id))
        _field(answer, "token_ids", list, self.proxy_url + path)
        return answer

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, in order; one `/tokenize` request a text.

        Raises:
            BatchError: some texts failed; it says which and why.
        """
        bodies = [{"prompt": text, "add_special_tokens": add_special_tokens} for text in texts]
        return await self._all("/tokenize", bodies, "tokens", list)

    async def detokenize(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Text of each list of token ids, in order; one `/detokenize` request a list.

        Raises:
            BatchError: some lists failed; it says which and why.
        """
        return await self._all(
            "/detokenize", [{"tokens": [int(t) for t in ids]} for ids in token_ids], "prompt", str
        )

    # Control plane: the same call to every server.

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
        return await self.call_all_servers("POST", "/pause", params=params)

    async def resume(self) -> dict[str, Any]:
        """Generate again, on every server."""
        return await self.call_all_servers("POST", "/resume")

    async def is_paused(self) -> dict[str, bool]:
        """Whether each server is paused."""
        return await self._ask_all("/is_paused", "is_paused", bool)

    async def sleep(self, level: Literal[1, 2] = 2) -> dict[str, Any]:
        """Free the memory of every server's accelerators; needs vLLM's --enable-sleep-mode.

        Args:
            level: 1 keeps a copy of the weights in main memory. 2, which is SkyRL's default, drops them: after
                `wake_up` they have to be sent again, and until then the server generates nonsense.
        """
        return await self.call_all_servers("POST", "/sleep", params={"level": str(int(level))})

    async def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Take the memory back, on every server.

        Args:
            tags: what to wake: "weights", "kv_cache" or both; None wakes everything.
        """
        if isinstance(tags, str):
            raise ValueError(f"tags is one string; write [{tags!r}]")
        return await self.call_all_servers("POST", "/wake_up", params={"tags": list(tags)} if tags else None)

    async def is_sleeping(self) -> dict[str, bool]:
        """Whether each server sleeps."""
        return await self._ask_all("/is_sleeping", "is_sleeping", bool)

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> dict[str, Any]:
        """Empty every server's prefix cache; needed after new weights.

        vLLM refuses with `success: false` while requests hold blocks, and that counts as a failure here.

        Args:
            reset_running_requests: whether running requests give their blocks up and start again.
        """
        params = {"reset_running_requests": str(reset_running_requests).lower()}
        return await self.call_all_servers("POST", "/reset_prefix_cache", params=params)

    async def get_weight_version(self) -> dict[str, str]:
        """The version that each server gives its weights; servers that differ generate with other weights."""
        return await self._ask_all("/weight_info", "weight_version", str)

    async def update_weight_version(self, new_version: str | int) -> dict[str, Any]:
        """Tell every server the version of the weights it has; the weights themselves stay as they are."""
        return await self.call_all_servers(
            "POST", "/update_weight_version", {"new_version": str(new_version)}
        )

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
        return await self.call_all_servers("POST", "/v1/load_lora_adapter", body, retry=_ONCE)

    async def unload_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        """Unload an adapter on every server."""
        body = {"lora_name": lora_name}
        return await self.call_all_servers("POST", "/v1/unload_lora_adapter", body, retry=_ONCE)

    async def get_server_info(self) -> dict[str, dict[str, Any]]:
        """Configuration, environment and system of each server, as vLLM reports them."""
        return await self.call_all_servers("GET", "/server_info", params={"config_format": "json"})

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
        retry: RetryPolicy | None = None,
    ) -> dict[str, Any]:
        """The same request to every server; what the other control methods do, for endpoints without one.

        Args:
            method: "GET" or "POST".
            path: of the endpoint, for example "/collective_rpc".
            body: sent as JSON.
            params: the query's parameters; a list is sent as several of that name.
            retry: instead of control_retry.

        Returns:
            Each server's answer by its address: a JSON value, a text, or None where it is empty.

        Raises:
            FanOutError: some servers failed. All the others were left to finish.
        """
        retry = retry or self.control_retry
        return await self._fan_out(
            f"{method} {path}",
            {
                url: self._call(url, method, path, body, params=params, retry=retry)
                for url in self.server_urls
            },
        )

    # Lifecycle.

    async def aclose(self) -> None:
        """Close the HTTP session. Never raises: a failure while closing is logged."""
        if self._generator is not None:
            await self._generator.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_generator": None}

    def _new_generator(self) -> RemoteInferenceGenerator:
        return RemoteInferenceGenerator(self.proxy_url, self.model_name, **self._generator_options)

    async def _post(
        self, path: str, body: Mapping[str, Any], session_id: str | None = None
    ) -> dict[str, Any]:
        if self.model_name is not None:
            body = {"model": self.model_name, **body}
        headers = {} if session_id is None else {"X-Session-ID": session_id}
        return await self.generator.request("POST", path, body, headers=headers)

    async def _all(self, path: str, bodies: Sequence[Mapping[str, Any]], key: str, kind: type[T]) -> list[T]:
        """`key` of the answer to each body, in order."""

        async def one(body: Mapping[str, Any]) -> T:
            return _field(await self._post(path, body), key, kind, self.proxy_url + path)

        done, failures = await settle(
            {place: self._tokenize_cap.run(one(body)) for place, body in enumerate(bodies)}
        )
        if failures:
            raise BatchError(failures, done)
        return list(done.values())

    async def _ask_all(self, path: str, key: str, kind: type[T]) -> dict[str, T]:
        """`key` of each server's answer; an answer without it counts as that server's failure."""

        async def one(url: str) -> T:
            return _field(await self._call(url, "GET", path, retry=self.control_retry), key, kind, url + path)

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
        http = self.generator._http()
        return await call(
            http, method, url + path, body=body, params=params, timeout_s=timeout_s, retry=retry
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


def _batch(input_batch: Mapping[str, Any]) -> tuple[list[Sequence[int]], Mapping[str, Any]]:
    """The prompts and sampling parameters of a batch whose form has been checked."""
    unknown = [key for key, value in input_batch.items() if key not in _BATCH_KEYS and value is not None]
    if unknown or input_batch.get("prompt_token_ids") is None:
        raise ValueError(
            f"a batch has prompt_token_ids, and perhaps {', '.join(_BATCH_KEYS[1:])}; this one has "
            f"{', '.join(input_batch) or 'nothing'}. Texts become token ids with tokenize, chats with "
            "render_chat_completion"
        )
    prompts = list(input_batch["prompt_token_ids"])
    for key in ("session_ids", "mm_features"):
        count = len(prompts) if input_batch.get(key) is None else len(input_batch[key])
        if count != len(prompts):
            raise ValueError(f"{key} has {count} entries for {len(prompts)} prompts")
    params = input_batch.get("sampling_params") or {}
    if (params.get("n") or 1) != 1:
        raise ValueError(f"n is {params['n']}; repeat the prompt in the batch instead, and leave n at 1")
    return prompts, params


def _field(answer: Any, key: str, kind: type[T], url: str) -> T:
    value = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(value, kind):
        raise PayloadError(
            f"{url} answered {str(answer)[:200]!r}, without a {key!r} of type {kind.__name__}. Is it a vLLM server?"
        )
    return value
