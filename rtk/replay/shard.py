"""What one pipeline stage of a Megatron model holds, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from rtk.errors import ShardError
from rtk.layout import ModelLayout


@dataclass(frozen=True)
class Shard:
    """One pipeline stage, with the layers spread evenly over the stages.

    Megatron gives each stage `num_layers / pipeline_size` consecutive layers and numbers all layers of
    the model from 1 (`layer_number`); a dense layer has a number but no router, and so no RouterReplay.

    Attributes:
        layout: the whole model's layers and routers.
        pipeline_size: pipeline-parallel size (PP).
        pipeline_rank: this stage's rank, 0-based.

    Raises:
        ShardError: the stage does not exist, or the layers do not divide evenly over the stages.
    """

    layout: ModelLayout
    pipeline_size: int = 1
    pipeline_rank: int = 0
    tensor_size: int = 1
    tensor_rank: int = 0
    sequence_parallel: bool = False
    context_size: int = 1
    context_rank: int = 0
    context_order: str = "zigzag"
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
        if self.layout.num_layers % self.pipeline_size:
            raise ShardError(
                f"{self.layout.num_layers} layers do not divide evenly over {self.pipeline_size} pipeline stages; "
                "choose a pipeline_size that divides them"
            )

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Megatron layer numbers (1-based, global) of all of the stage's layers, dense ones too."""
        count = self.layout.num_layers // self.pipeline_size
        first = self.pipeline_rank * count + 1
        return tuple(range(first, first + count))

    @property
    def router_layer_numbers(self) -> tuple[int, ...]:
        """Megatron layer numbers of the stage's MoE layers, in the order in which routers are built."""
        moe = set(self.layout.moe_layers)
        return tuple(number for number in self.layer_numbers if number - 1 in moe)

    def __str__(self) -> str:
        return f"pipeline stage {self.pipeline_rank} of {self.pipeline_size}"
