"""Which of a model's layers are MoE layers, and how wide their routers are."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtk.errors import LayoutError

# Hugging Face configs name the same two numbers differently from family to family.
_EXPERTS_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
# More layers than any model has; a slip such as [1]*10**9 must not fill the memory.
_LONGEST_PATTERN = 100_000
_TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")


@dataclass(frozen=True)
class ModelLayout:
    """The layers of an MoE language model, as far as its routes are concerned.

    Attributes:
        num_layers: all transformer layers of the backbone, dense ones too; MTP layers are not counted.
        moe_layers: 0-based indices of the MoE layers, ascending. They index axis 1 of a routed_experts
            array, and are the N of `model.layers.N` in a Hugging Face checkpoint. Megatron's
            `layer_number` of the same layer is one more.
        num_experts: routed experts of each MoE layer; shared experts are not counted.
        top_k: experts that a router picks for each token.

    Raises:
        LayoutError: the numbers contradict each other.
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "moe_layers", tuple(int(layer) for layer in self.moe_layers))
        if self.num_layers < 1:
            raise LayoutError(f"num_layers is {self.num_layers}; a model has at least one layer")
        if not self.moe_layers:
            raise LayoutError("moe_layers is empty: a model without MoE layers has no routes to look at")
        if list(self.moe_layers) != sorted(set(self.moe_layers)):
            raise LayoutError(f"moe_layers {self.moe_layers} must be ascending, without repeats")
        if self.moe_layers[0] < 0 or self.moe_layers[-1] >= self.num_layers:
            raise LayoutError(
                f"moe_layers {self.moe_layers} are 0-based indices and must lie in 0..{self.num_layers - 1}"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise LayoutError(f"top_k is {self.top_k}, which must lie in 1..num_experts={self.num_experts}")

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """0-based indices of the layers without a router, ascending."""
        moe = set(self.moe_layers)
        return tuple(i for i in range(self.num_layers) if i not in moe)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | os.PathLike[str]) -> ModelLayout:
        """Read the layout out of a Hugging Face config.

        Knows these ways in which configs mark dense layers: `mlp_layer_types` (what transformers 5 writes),
        `moe_layers` (Llama 4), `mlp_only_layers` with `decoder_sparse_step` (Qwen2-MoE, Qwen3-MoE),
        `first_k_dense_replace` with `moe_layer_freq` (DeepSeek-V2/V3, Moonlight, GLM-4.5) and none at all (Mixtral,
        OLMoE, gpt-oss). A family's defaults for keys that are left out are not known: give the config as
        `save_pretrained` writes it.

        Args:
            config: the config as a mapping, the path of a config.json, or the folder that holds one.

        Raises:
            LayoutError: the file is missing or no JSON object, names no experts, or places them by a key that is not
            read here.
        """
        if not isinstance(config, Mapping):
            config = _read_config(Path(config))
        # Multi-modal models keep the language model's numbers one level down.
        text = config.get("text_config")
        if isinstance(text, Mapping):
            config = text
        num_layers = _integer(config, ("num_hidden_layers",))
        return cls(
            num_layers=num_layers,
            moe_layers=_moe_layers(config, num_layers),
            num_experts=_integer(config, _EXPERTS_KEYS),
            top_k=_integer(config, _TOP_K_KEYS),
        )

    @classmethod
    def from_megatron(
        cls,
        *,
        num_layers: int,
        num_experts: int,
        moe_router_topk: int,
        moe_layer_freq: int | str | Sequence[int] = 1,
    ) -> ModelLayout:
        """Read the layout out of Megatron's arguments, as a training script names them.

        Args:
            num_layers: `--num-layers`; MTP layers are not counted.
            num_experts: `--num-experts` (`num_moe_experts` of a TransformerConfig).
            moe_router_topk: `--moe-router-topk`.
            moe_layer_freq: `--moe-layer-freq`. A number N makes every N-th layer an MoE layer, beginning with
                the first; a list has a 1 for each MoE layer and a 0 for each dense one; a string holds
                either, the list as a pattern such as `([0]*1+[1]*3)*2`.

        Raises:
            LayoutError: the pattern is none, or has another length than the model.
        """
        pattern = _megatron_pattern(moe_layer_freq, num_layers)
        return cls(
            num_layers, tuple(i for i, is_moe in enumerate(pattern) if is_moe), num_experts, moe_router_topk
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `ModelLayout(**layout.to_dict())` gives the same layout back."""
        return {
            "num_layers": self.num_layers,
            "moe_layers": list(self.moe_layers),
            "num_experts": self.num_experts,
            "top_k": self.top_k,
        }


def _read_config(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise LayoutError(f"cannot read the model config {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise LayoutError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise LayoutError(f"{file} holds a {type(config).__name__}, not a config object")
    return config


def _integer(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise LayoutError(
        f"the config of model type {config.get('model_type')!r} has none of {', '.join(keys)} as a whole "
        "number; is it a Mixture-of-Experts model? Build a rtk.ModelLayout(...) by hand if it is"
    )


# The keys that say which layers are MoE layers, and are read here.
_PLACEMENT_KEYS = (
    "decoder_sparse_step",
    "first_k_dense_replace",
    "mlp_layer_types",
    "mlp_only_layers",
    "moe_layer_freq",
    "moe_layers",
)
# A key that has a word of each set places experts by a rule of its own; so do the others.
_OF_EXPERTS = {"moe", "expert", "experts", "sparse", "dense"}
_OF_PLACES = {
    "end", "enum", "every", "freq", "frequency", "index", "interval", "layer", "layers", "offset", "pattern", "period",
    "start", "step", "types",
}  # fmt: skip
_OTHER_PLACEMENT_KEYS = ("hybrid_override_pattern", "layers_block_type")


def _moe_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """By the layer types where there are some, as transformers 5 writes them; else by the older keys."""
    types, listed = config.get("mlp_layer_types"), config.get("moe_layers")
    if types is not None:
        if not isinstance(types, Sequence) or set(types) - {"dense", "sparse"} or len(types) != num_layers:
            raise LayoutError(
                f"mlp_layer_types is {types!r}: it has 'dense' or 'sparse' for each of {num_layers} layers"
            )
        return tuple(i for i, kind in enumerate(types) if kind == "sparse")
    if listed is not None:
        return tuple(sorted(set(_whole_numbers("moe_layers", listed))))
    _refuse_unknown_placement(config)
    frequency = config.get("moe_layer_freq", 1)
    if isinstance(frequency, list):
        if len(frequency) != num_layers:
            raise LayoutError(f"moe_layer_freq has {len(frequency)} entries for {num_layers} layers")
        return tuple(i for i, is_moe in enumerate(frequency) if is_moe)
    _at_least("moe_layer_freq", frequency, 1)
    first = config.get("first_k_dense_replace")
    step = config.get("decoder_sparse_step")
    first = 0 if first is None else _at_least("first_k_dense_replace", first, 0)
    step = 1 if step is None else _at_least("decoder_sparse_step", step, 1)
    dense = set(_whole_numbers("mlp_only_layers", config.get("mlp_only_layers") or ()))
    return tuple(
        i
        for i in range(num_layers)
        if i >= first and i % frequency == 0 and i not in dense and (i + 1) % step == 0
    )


def _refuse_unknown_placement(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        words = set(str(key).split("_"))
        places = key in _OTHER_PLACEMENT_KEYS or (words & _OF_EXPERTS and words & _OF_PLACES)
        if places and key not in _PLACEMENT_KEYS and value is not None:
            raise LayoutError(
                f"the config of model type {config.get('model_type')!r} says by {key!r} which layers are MoE layers, which "
                "is not read here: build a rtk.ModelLayout(num_layers, moe_layers, num_experts, top_k) by hand"
            )


def _at_least(key: str, value: object, least: int) -> int:
    if type(value) is not int or value < least:
        raise LayoutError(f"{key} is {value!r}; it is a whole number of {least} or more")
    return value


def _whole_numbers(key: str, values: object) -> list[int]:
    if not isinstance(values, list | tuple) or any(type(value) is not int for value in values):
        raise LayoutError(f"{key} is {values!r}; it is a list of layers")
    return list(values)


def _megatron_pattern(frequency: int | str | Sequence[int], num_layers: int) -> list[int]:
    pattern = _read_pattern(frequency) if isinstance(frequency, str) else frequency
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        if pattern < 1:
            raise LayoutError(
                f"moe_layer_freq is {pattern}; every N-th layer is an MoE layer for an N of 1 or more"
            )
        return [int(i % pattern == 0) for i in range(num_layers)]
    if not isinstance(pattern, Sequence) or any(is_moe not in (0, 1) for is_moe in pattern):
        raise LayoutError(
            f"moe_layer_freq is {frequency!r}: it is a number, a list of 0 and 1, or a string such as '([0]*1+[1]*3)*2'"
        )
    if len(pattern) != num_layers:
        raise LayoutError(f"moe_layer_freq {frequency!r} has {len(pattern)} entries for {num_layers} layers")
    return list(pattern)


def _read_pattern(text: str) -> Any:
    """The value of a pattern. Megatron evaluates it as Python; here only lists, + and * have a meaning."""

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.List(elts=entries):
                return [value(entry) for entry in entries]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return [*value(left), *value(right)]
            case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))):
                entries = [*value(left)]
                if len(entries) * times <= _LONGEST_PATTERN:
                    return entries * times
        raise ValueError("not part of a pattern")

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise LayoutError(
            f"cannot read moe_layer_freq {text!r}: it is a number or a pattern such as '([0]*1+[1]*3)*2'"
        ) from error
