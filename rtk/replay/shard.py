"""What one pipeline stage of a Megatron model holds, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rtk.errors import ShardError
from rtk.layout import ModelLayout

if TYPE_CHECKING:
    from rtk.replay.megatron import Model


@dataclass(frozen=True)
class Shard:
    """Interim: the fields of the design, of which only even splits are worked out here.

    Raises:
        ShardError: the stage does not exist, or the layers do not divide evenly over the stages.
    """

    layout: ModelLayout
    pipeline_size: int = 1
    pipeline_rank: int = 0
    virtual_size: int = 1
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_layout: str | None = None
    mtp_layers: int = 0
    tensor_size: int = 1
    tensor_rank: int = 0
    sequence_parallel: bool = False
    context_size: int = 1
    context_rank: int = 0
    context_order: Literal["zigzag", "contiguous"] = "zigzag"
    expert_size: int = 1
    expert_rank: int = 0

    def __post_init__(self) -> None:
        if self.pipeline_size < 1:
            raise ShardError(f"pipeline_size is {self.pipeline_size}; it is at least 1")
        if not 0 <= self.pipeline_rank < self.pipeline_size:
            raise ShardError(
                f"pipeline_rank {self.pipeline_rank} does not exist: ranks are 0..{self.pipeline_size - 1} "
                f"for pipeline_size {self.pipeline_size}"
            )
        if self.layout.num_layers % (self.pipeline_size * self.virtual_size):
            raise ShardError(
                f"{self.layout.num_layers} layers do not divide evenly over {self.pipeline_size} pipeline stages; "
                "choose a pipeline_size that divides them"
            )

    @classmethod
    def from_megatron(cls, model_or_chunks: Model, layout: ModelLayout | None = None) -> Shard:
        from rtk.replay import megatron

        return megatron.shard_of(model_or_chunks, layout)

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Megatron layer numbers (1-based, global) of each model chunk."""
        count = self.layout.num_layers // (self.pipeline_size * self.virtual_size)
        firsts = (
            (virtual * self.pipeline_size + self.pipeline_rank) * count + 1
            for virtual in range(self.virtual_size)
        )
        return tuple(tuple(range(first, first + count)) for first in firsts)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Megatron layer numbers (1-based, global) of all of the stage's layers, dense ones too."""
        return tuple(number for chunk in self.chunks for number in chunk)

    @property
    def router_layer_numbers(self) -> tuple[int, ...]:
        """Megatron layer numbers of the stage's MoE layers, in the order in which routers are built."""
        moe = set(self.layout.moe_layers)
        return tuple(number for number in self.layer_numbers if number - 1 in moe)

    @property
    def mtp_router_numbers(self) -> tuple[int, ...]:
        """Depths (1-based) of the stage's MTP layers that have routers."""
        last = self.pipeline_rank == self.pipeline_size - 1
        return tuple(range(1, self.mtp_layers + 1)) if last else ()

    def __str__(self) -> str:
        return f"pipeline stage {self.pipeline_rank} of {self.pipeline_size}"
