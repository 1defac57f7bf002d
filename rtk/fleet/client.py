"""Generation through a proxy, and control over every server behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import aiohttp

from rtk.client.generator import RemoteInferenceGenerator, session_header
from rtk.client.result import RemoteGenerateResult
from rtk.client.transport import RetryPolicy
from rtk.errors import BatchError
from rtk.fleet.control import ControlPlane
from rtk.fleet.fan_out import LoopCap, field, settle

T = TypeVar("T")

_CONTROL_RETRY = RetryPolicy(tries=3)
_BATCH_KEYS = ("prompt_token_ids", "sampling_params", "session_ids", "mm_features", "cache_salt")


class RemoteInferenceClient(ControlPlane):
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
            LoRA calls and `call_all_servers` are sent once: a repeated one might be refused, or do more.
        generator: everything else is the RemoteInferenceGenerator's, for example headers=... or retry=....

    Raises:
        ValueError: server_urls is empty, one string, or names a server twice; or a number makes no sense.
    """

    def __init__(
        self,
        proxy_url: str,
        server_urls: Sequence[str] | None = None,
        *,
        model_name: str | None = None,
        data_parallel_size: int = 1,
        concurrency_per_server: int | None = 512,
        control_timeout_s: float | None = 600.0,
        control_retry: RetryPolicy = _CONTROL_RETRY,
        **generator: Any,
    ) -> None:
        self.proxy_url = proxy_url.rstrip("/")
        super().__init__(
            [proxy_url] if server_urls is None else server_urls,
            data_parallel_size=data_parallel_size,
            control_timeout_s=control_timeout_s,
            control_retry=control_retry,
        )
        self.model_name = model_name
        limit = None if concurrency_per_server is None else concurrency_per_server * len(self.server_urls)
        self._generate_cap = LoopCap(limit)
        # Apart, so that short tokenize calls do not wait behind long generations.
        self._tokenize_cap = LoopCap(limit)
        self._generator_options = generator
        self._generator: RemoteInferenceGenerator | None = self._new_generator()

    @property
    def generator(self) -> RemoteInferenceGenerator:
        """The generator for the proxy; it holds the HTTP session. Made again after unpickling."""
        if self._generator is None:
            self._generator = self._new_generator()
        self._generator.model_name = self.model_name  # it may have been set anew
        return self._generator

    async def generate_single(
        self, token_ids: Sequence[int], sampling_params: Mapping[str, Any], **options: Any
    ) -> RemoteGenerateResult:
        """Generate one sequence, when the cap has room. Arguments, result and errors are those of
        `RemoteInferenceGenerator.generate`; model="name of an adapter" asks a loaded LoRA adapter."""
        async with self._generate_cap.here():
            return await self.generator.generate(token_ids, sampling_params, **options)

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
        try:
            texts = await self.detokenize([result.token_ids for result in results.values()])
        except BatchError as error:
            raise BatchError(error.failures, results) from error
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
        async with self._generate_cap.here():
            return await self._post("/v1/completions", body, session_id)

    async def chat_completion(
        self, body: Mapping[str, Any], *, session_id: str | None = None
    ) -> dict[str, Any]:
        """One `/v1/chat/completions` request, not streamed; returns the server's JSON."""
        async with self._generate_cap.here():
            return await self._post("/v1/chat/completions", body, session_id)

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
        async with self._generate_cap.here():
            answer = await self._post(path, body, session_id)
        field(answer, "token_ids", list, self.proxy_url + path)
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

    def _http(self) -> aiohttp.ClientSession:
        return self.generator._transport.session()

    def _new_generator(self) -> RemoteInferenceGenerator:
        return RemoteInferenceGenerator(self.proxy_url, self.model_name, **self._generator_options)

    async def _post(
        self, path: str, body: Mapping[str, Any], session_id: str | None = None
    ) -> dict[str, Any]:
        if self.model_name is not None:
            body = {"model": self.model_name, **body}
        return await self.generator.request("POST", path, body, headers=session_header(session_id))

    async def _all(self, path: str, bodies: Sequence[Mapping[str, Any]], key: str, kind: type[T]) -> list[T]:
        """`key` of the answer to each body, in order."""

        async def one(body: Mapping[str, Any]) -> T:
            async with self._tokenize_cap.here():
                return field(await self._post(path, body), key, kind, self.proxy_url + path)

        done, failures = await settle({place: one(body) for place, body in enumerate(bodies)})
        if failures:
            raise BatchError(failures, done)
        return list(done.values())


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
