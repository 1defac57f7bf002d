"""A small MoE language model on the CPU, one token a step, with the routes of every step.

The routes are those of the forward pass that made the token: each router module's own output is
recorded as it passes by, nothing is computed a second time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from rtk.errors import EmbeddedServerError, LayoutError
from rtk.layout.model_layout import ModelLayout


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, under vLLM's names and with its meanings.

    Attributes:
        max_tokens: generate at most so many.
        min_tokens: do not stop before so many.
        temperature: 0 takes the most probable token.
        top_p: sample from the smallest set of tokens that holds this probability.
        top_k: sample from the so many most probable tokens; 0 for all.
        seed: of this request's own random numbers; None draws a fresh one.
        logprobs: also report the so many most probable tokens of each step; None reports none at all.
        prompt_logprobs: the same for each token of the prompt; None computes none.
        stop_token_ids: end after any of these.
        ignore_eos: go on past the model's own end-of-text token.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True)
class ScoredToken:
    """A token, and what the model thought of it before it was known.

    Attributes:
        id: the token.
        logprob: natural log of its probability in the model's own distribution, before temperature.
        rank: its place among all tokens by probability; the most probable one has rank 1.
        top: (token, logprob) of the most probable tokens at that position, best first.
    """

    id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Token(ScoredToken):
    """One generated token.

    Attributes:
        finish_reason: "stop" or "length" on the last token, else None.
        stop_reason: the one of the request's own stop_token_ids that ended the sequence, else None.
    """

    finish_reason: str | None
    stop_reason: int | None


@dataclass
class Generation:
    """One sequence under way; `Engine.step` moves it on by a token.

    Attributes:
        prompt_logprobs: the prompt's tokens but the first, which nothing comes before; None where not
            asked for. Known after the first step.
    """

    prompt: list[int]
    params: SamplingParams
    random: torch.Generator
    cache: DynamicCache
    generated: list[int] = field(default_factory=list)
    routes: list[npt.NDArray[np.unsignedinteger[Any]]] = field(default_factory=list)
    prompt_logprobs: list[ScoredToken] | None = None

    def routed_experts(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Expert ids `[prompt + generated - 1, layers, top_k]`: a row for each token that was forwarded."""
        return np.concatenate(self.routes)


class Engine:
    """Loads a model folder and generates from it. Not thread-safe: one step at a time.

    Args:
        folder: a Hugging Face model folder with a tokenizer.
        max_model_len: longest sequence, prompt and answer; the model's own limit where left out.

    Raises:
        EmbeddedServerError: the folder holds no MoE model that transformers can load, or one whose
            routers cannot be recorded.
    """

    def __init__(self, folder: Path, *, max_model_len: int | None = None) -> None:
        try:
            self.layout = ModelLayout.from_config(folder)
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True
            )
        except (OSError, ValueError, LayoutError) as error:
            raise EmbeddedServerError(f"cannot serve the model in {folder}: {error}") from error
        self._model.eval()
        longest = int(self._model.config.max_position_embeddings)
        if max_model_len is not None and not 1 <= max_model_len <= longest:
            raise EmbeddedServerError(
                f"max_model_len is {max_model_len}; this model takes 1..{longest} tokens"
            )
        self.max_model_len = max_model_len or longest
        self.vocab_size = int(self._model.config.vocab_size)
        self._eos = self._ends_of_text()
        self._dtype = np.uint8 if self.layout.num_experts <= 256 else np.uint16
        self._passing: dict[int, torch.Tensor] = {}
        self._record_routers()

    def _ends_of_text(self) -> frozenset[int]:
        # Chat models name further ones in generation_config.json only.
        ends = self._model.generation_config.eos_token_id
        named = [ends] if isinstance(ends, int) else ends or []
        return frozenset(token for token in (*named, self.tokenizer.eos_token_id) if token is not None)

    def _record_routers(self) -> None:
        found = []
        for name, module in self._model.named_modules():
            layer = re.search(r"\blayers\.(\d+)\.", name)
            if layer and type(module).__name__.endswith("Router"):
                found.append(int(layer[1]))
                module.register_forward_hook(self._recorder(int(layer[1])))
        if tuple(found) != self.layout.moe_layers:
            raise EmbeddedServerError(
                f"{type(self._model).__name__} has routers in layers {found}, while its config names the MoE layers "
                f"{list(self.layout.moe_layers)}: its routes cannot be recorded"
            )
        self._try_routers()

    @torch.inference_mode()
    def _try_routers(self) -> None:
        """Forward one token: a router that reports anything but expert ids must not come to light later."""
        self._model(torch.tensor([[0]]), use_cache=False)
        for layer in self.layout.moe_layers:
            experts = self._passing.pop(layer, None)
            if (
                not isinstance(experts, torch.Tensor)
                or experts.is_floating_point()
                or experts.shape != (1, self.layout.top_k)
            ):
                raise EmbeddedServerError(
                    f"the router of layer {layer} of {type(self._model).__name__} does not report the ids of "
                    f"{self.layout.top_k} experts a token as its last output: its routes cannot be recorded"
                )

    def _recorder(self, layer: int) -> Any:
        def record(_module: torch.nn.Module, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
            # transformers' routers return (logits, weights, indices).
            self._passing[layer] = output[-1]

        return record

    def start(self, prompt: list[int], params: SamplingParams) -> Generation:
        """Begin a sequence; nothing is computed yet."""
        random = torch.Generator()
        if params.seed is None:
            random.seed()
        else:
            random.manual_seed(params.seed)
        return Generation(list(prompt), params, random, DynamicCache(config=self._model.config))

    @torch.inference_mode()
    def step(self, generation: Generation) -> Token:
        """Forward what is new, record its routes, and choose the next token."""
        params = generation.params
        score_prompt = params.prompt_logprobs is not None and not generation.generated
        new = generation.generated[-1:] or generation.prompt
        output = self._model(
            torch.tensor([new]),
            past_key_values=generation.cache,
            use_cache=True,
            logits_to_keep=len(new) if score_prompt else 1,
        )
        generation.routes.append(self._take_routes(len(new)))
        all_logits = output.logits[0].float()
        if score_prompt:
            generation.prompt_logprobs = [
                _score(logits.log_softmax(-1), token, params.prompt_logprobs)
                for logits, token in zip(all_logits[:-1], generation.prompt[1:], strict=True)
            ]
        logits = all_logits[-1]
        logprobs = logits.log_softmax(-1)
        if len(generation.generated) < params.min_tokens:
            logits[list(params.stop_token_ids | self._eos)] = -torch.inf
        chosen = _choose(logits, params, generation.random)
        generation.generated.append(chosen)
        scored = _score(logprobs, chosen, params.logprobs)
        finish_reason, stop_reason = self._end(generation)
        return Token(**vars(scored), finish_reason=finish_reason, stop_reason=stop_reason)

    def _end(self, generation: Generation) -> tuple[str | None, int | None]:
        params, last = generation.params, generation.generated[-1]
        if last in self._eos and not params.ignore_eos:
            return "stop", None
        if last in params.stop_token_ids:
            return "stop", last
        return ("length" if len(generation.generated) >= params.max_tokens else None), None

    def _take_routes(self, rows: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        routes = np.zeros((rows, self.layout.num_layers, self.layout.top_k), dtype=self._dtype)
        for layer in self.layout.moe_layers:
            routes[:, layer] = self._passing.pop(layer).reshape(rows, -1).numpy()
        return routes


def _score(logprobs: torch.Tensor, token: int, top: int | None) -> ScoredToken:
    best = logprobs.topk(top or 0)
    return ScoredToken(
        id=token,
        logprob=float(logprobs[token]),
        rank=int((logprobs >= logprobs[token]).sum()),
        top=list(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
    )


def _choose(logits: torch.Tensor, params: SamplingParams, random: torch.Generator) -> int:
    if params.temperature == 0:
        return int(logits.argmax())
    ordered, tokens = (logits / params.temperature).sort(descending=True)
    if params.top_k:
        ordered, tokens = ordered[: params.top_k], tokens[: params.top_k]
    probabilities = ordered.softmax(-1)
    if params.top_p < 1:
        # Keep each token before which less than top_p has been collected: the best one always stays.
        probabilities = torch.where(
            probabilities.cumsum(-1) - probabilities < params.top_p, probabilities, 0.0
        )
    return int(tokens[torch.multinomial(probabilities, 1, generator=random)])
