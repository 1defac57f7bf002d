"""What one pipeline stage of a Megatron model holds, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rtk.errors import ShardError
from rtk.layout import ModelLayout


@dataclass(frozen=True)
class Shard:
    """One rank of a Megatron model, with the layers spread evenly over the pipeline stages.

    Megatron gives each stage `num_layers / pipeline_size` consecutive layers and numbers all layers of
    the model from 1 (`layer_number`); a dense layer has a number but no router, and so no RouterReplay.

    Attributes:
        layout: the whole model's layers and routers.
        pipeline_size: pipeline-parallel size (PP).
        pipeline_rank: this stage's rank, 0-based, as all ranks here.
        virtual_size: model chunks a pipeline rank holds (virtual pipeline, VPP); the model is then a list of
            them, and the routers are those of all chunks in turn.
        tensor_size, tensor_rank: tensor parallelism (TP); it cuts tokens only with sequence_parallel.
        sequence_parallel: whether each TP rank's routers see a part of the tokens.
        context_size, context_rank: context parallelism (CP), which cuts each sequence.
        context_order: which parts a CP rank gets: "zigzag" as Megatron, or "contiguous"; see `Batch.local`.
        expert_size, expert_rank: expert parallelism (EP); every rank holds whole routers all the same.

    Raises:
        ShardError: the rank does not exist, or the layers or experts do not divide evenly.
    """

    layout: ModelLayout
    pipeline_size: int = 1
    pipeline_rank: int = 0
    virtual_size: int = 1
    tensor_size: int = 1
    tensor_rank: int = 0
    sequence_parallel: bool = False
    context_size: int = 1
    context_rank: int = 0
    context_order: Literal["zigzag", "contiguous"] = "zigzag"
    expert_size: int = 1
    expert_rank: int = 0

    def __post_init__(self) -> None:
        for kind in ("pipeline", "tensor", "context", "expert"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            if size < 1:
                raise ShardError(f"{kind}_size is {size}; it is at least 1")
            if not 0 <= rank < size:
                raise ShardError(
                    f"{kind}_rank {rank} does not exist: ranks are 0..{size - 1} for {kind}_size {size}"
                )
        if self.context_order not in ("zigzag", "contiguous"):
            raise ShardError(f"context_order is {self.context_order!r}; it is 'zigzag' or 'contiguous'")
        if self.layout.num_experts % self.expert_size:
            raise ShardError(
                f"{self.layout.num_experts} experts do not divide evenly over {self.expert_size} expert-parallel ranks"
            )
        if self.virtual_size < 1:
            raise ShardError(f"virtual_size is {self.virtual_size}; it is at least 1")
        if self.layout.num_layers % (self.pipeline_size * self.virtual_size):
            chunks = "" if self.virtual_size == 1 else f" of {self.virtual_size} virtual chunks each"
            raise ShardError(
                f"{self.layout.num_layers} layers do not divide evenly over {self.pipeline_size} pipeline stages{chunks}; "
                "choose sizes that divide them"
            )

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Megatron layer numbers (1-based, global) of each of the rank's model chunks, dense layers too.

        The chunks of all ranks take turns: chunk 0 of every rank comes before chunk 1 of any
        (megatron.core.transformer.transformer_layer.get_transformer_layer_offset).
        """
        count = self.layout.num_layers // (self.pipeline_size * self.virtual_size)
        firsts = [
            (chunk * self.pipeline_size + self.pipeline_rank) * count + 1
            for chunk in range(self.virtual_size)
        ]
        return tuple(tuple(range(first, first + count)) for first in firsts)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Megatron layer numbers of all of the rank's layers, chunk by chunk."""
        return tuple(number for chunk in self.chunks for number in chunk)

    @property
    def router_layer_numbers(self) -> tuple[int, ...]:
        """Megatron layer numbers of the rank's MoE layers, in the order in which routers are built."""
        moe = set(self.layout.moe_layers)
        return tuple(number for number in self.layer_numbers if number - 1 in moe)

    def __str__(self) -> str:
        return f"pipeline stage {self.pipeline_rank} of {self.pipeline_size}"
