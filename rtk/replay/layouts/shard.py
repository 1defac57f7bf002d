"""What one rank of a Megatron training job holds, as plain values."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from rtk.errors import ShardError
from rtk.layout.model_layout import ModelLayout
from rtk.replay.layouts import pipeline_layers

ContextOrder = Literal["zigzag", "contiguous"]


@dataclass(frozen=True, repr=False)
class Shard:
    """One rank of a Megatron job: which layers it holds, and which tokens its routers see.

    Megatron numbers all layers of the backbone from 1 (`layer_number`); a dense layer has a number but no
    router, and so no RouterReplay. How the layers are cut into stages follows megatron-core, see
    docs/replay-layouts.md. Fields carry Megatron's own argument names where it has one; with the defaults
    there is no parallelism of that kind.

    Attributes:
        layout: the whole model's layers and routers.
        pipeline_size: pipeline-parallel size (PP).
        pipeline_rank: this rank's place in the pipeline, 0-based, as all ranks here.
        virtual_size: model chunks that a pipeline rank holds (VPP). With a `pipeline_layout` it follows
            from the number of stages, and may be left out.
        num_layers_in_first_pipeline_stage: layers of pipeline rank 0, over all of its chunks; None means
            as many as the others.
        num_layers_in_last_pipeline_stage: the same of the last rank.
        account_for_embedding_in_pipeline_split: the embedding counts as a layer, so that the first chunk
            holds one less.
        account_for_loss_in_pipeline_split: the loss counts as a layer, so that the last chunk holds one less.
        pipeline_layout: Megatron's `pipeline_model_parallel_layout` string, such as `Et|(tt|)*3mL`.
        mtp_layers: multi-token-prediction depth (`mtp_num_layers`); their routers are no backbone layers.
        tensor_size: tensor-parallel size (TP).
        tensor_rank: place among them.
        sequence_parallel: whether each TP rank's routers see only their slice of the sequence.
        context_size: context-parallel size (CP).
        context_rank: place among them.
        context_order: `zigzag`, as Megatron slices: of 2*CP equal pieces of a sequence, rank r takes
            pieces r and 2*CP-1-r; or `contiguous`: piece r of CP.
        expert_size: expert-parallel size (EP). It moves no routes; padding is spread over the ranks.
        expert_rank: place among them.

    Raises:
        ShardError: a rank does not exist, or something does not divide as Megatron needs it to.
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
    context_order: ContextOrder = "zigzag"
    expert_size: int = 1
    expert_rank: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.layout, ModelLayout):
            raise ShardError(
                f"layout is a {type(self.layout).__name__}, not a rtk.ModelLayout: ModelLayout.from_config reads one "
                "from a config, ModelLayout(**values) makes one of plain values"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" or (field.type == "int | None" and value is not None):
                try:
                    object.__setattr__(self, field.name, operator.index(value))
                except TypeError as error:
                    raise ShardError(f"{field.name} is {value!r}; it is a whole number") from error
        for kind in ("pipeline", "tensor", "context", "expert"):
            size, rank = getattr(self, f"{kind}_size"), getattr(self, f"{kind}_rank")
            if size < 1:
                raise ShardError(f"{kind}_size is {size}; it is at least 1")
            if not 0 <= rank < size:
                raise ShardError(
                    f"{kind}_rank {rank} does not exist: ranks are 0..{size - 1} for {kind}_size {size}"
                )
        if self.virtual_size < 1:
            raise ShardError(f"virtual_size is {self.virtual_size}; it is at least 1")
        if self.mtp_layers < 0:
            raise ShardError(f"mtp_layers is {self.mtp_layers}; it is at least 0")
        if self.context_order not in ("zigzag", "contiguous"):
            raise ShardError(f"context_order is {self.context_order!r}; it is 'zigzag' or 'contiguous'")
        if self.layout.num_experts % self.expert_size:
            raise ShardError(
                f"{self.layout.num_experts} experts do not divide evenly over {self.expert_size} expert-parallel ranks"
            )
        self._check_pipeline_arguments()
        # Cutting the model now says at once when it cannot be cut.
        stages = len(self._stages)
        object.__setattr__(self, "virtual_size", stages // self.pipeline_size)
        if self.virtual_size > 1 and self.pipeline_size == 1:
            raise ShardError(
                "virtual stages need a pipeline: Megatron refuses virtual_size > 1 with pipeline_size 1"
            )

    def _check_pipeline_arguments(self) -> None:
        uneven = (
            self.num_layers_in_first_pipeline_stage is not None
            or self.num_layers_in_last_pipeline_stage is not None
        )
        accounted = self.account_for_embedding_in_pipeline_split or self.account_for_loss_in_pipeline_split
        if self.pipeline_layout is not None and (uneven or accounted):
            raise ShardError("pipeline_layout says all; leave the other arguments of the pipeline split out")
        if uneven and accounted:
            raise ShardError(
                "num_layers_in_first/last_pipeline_stage and account_for_embedding/loss_in_pipeline_split "
                "exclude each other, in Megatron too"
            )

    @cached_property
    def _stages(self) -> tuple[tuple[int, int], ...]:
        """(backbone layers, MTP layers) of each chunk of the whole pipeline, in the order data takes."""
        num_layers, chunks = self.layout.num_layers, self.pipeline_size * self.virtual_size
        if self.pipeline_layout is not None:
            parsed = pipeline_layers.parse(self.pipeline_layout)
            pipeline_layers.check_layout(
                parsed,
                self.pipeline_layout,
                num_layers=num_layers,
                mtp_layers=self.mtp_layers,
                pipeline_size=self.pipeline_size,
            )
            if self.virtual_size not in (1, len(parsed) // self.pipeline_size):
                raise ShardError(
                    f"pipeline_layout {self.pipeline_layout!r} has {len(parsed)} stages, while pipeline_size "
                    f"{self.pipeline_size} times virtual_size {self.virtual_size} is {chunks}"
                )
            return tuple((chunk.count("t"), chunk.count("m")) for chunk in parsed)
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        if first is None and last is None:
            layers = pipeline_layers.even(
                num_layers,
                self.pipeline_size,
                self.virtual_size,
                embedding=self.account_for_embedding_in_pipeline_split,
                loss=self.account_for_loss_in_pipeline_split,
            )
        else:
            layers = pipeline_layers.uneven(
                num_layers, self.pipeline_size, self.virtual_size, first=first, last=last
            )
        return tuple(zip(layers, [0] * (chunks - 1) + [self.mtp_layers], strict=True))

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Layer numbers (1-based, global) of the backbone layers in each model chunk, dense ones too."""
        chunks = []
        end = 0
        for stage, (count, _) in enumerate(self._stages):
            if stage % self.pipeline_size == self.pipeline_rank:
                chunks.append(tuple(range(end + 1, end + count + 1)))
            end += count
        return tuple(chunks)

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Layer numbers (1-based, global) of all of the rank's backbone layers, chunk by chunk."""
        return tuple(number for chunk in self.chunks for number in chunk)

    @property
    def router_layer_numbers(self) -> tuple[int, ...]:
        """Layer numbers of the rank's MoE layers, in the order in which Megatron builds their routers."""
        moe = set(self.layout.moe_layers)
        return tuple(number for number in self.layer_numbers if number - 1 in moe)

    @property
    def mtp_router_numbers(self) -> tuple[int, ...]:
        """Depths (1-based) of the MTP layers on this rank that have a router, built after the backbone's.

        Megatron builds an MTP layer like the backbone's last layer, so that it has a router where that one
        has. MTP depth d has nothing to do with backbone layer d (the fault of NeMo RL #3903).
        """
        if self.layout.num_layers - 1 not in self.layout.moe_layers:
            return ()
        here = self._stages[self.pipeline_rank :: self.pipeline_size]
        return tuple(range(1, sum(mtp for _, mtp in here) + 1))

    def every_rank(self) -> Iterator[Shard]:
        """The shards of the same job whose routers see other layers or other tokens.

        Runs over pipeline ranks, context ranks and, with sequence parallelism, tensor ranks. The other
        ranks repeat what these hold, except for where they send their padding.
        """
        for pipeline in range(self.pipeline_size):
            for context in range(self.context_size):
                for tensor in range(self.tensor_size) if self.sequence_parallel else [self.tensor_rank]:
                    yield dataclasses.replace(
                        self, pipeline_rank=pipeline, context_rank=context, tensor_rank=tensor
                    )

    @classmethod
    def from_megatron(cls, model: Any, layout: ModelLayout | None = None) -> Shard:
        """Read a shard off live megatron-core modules; see `rtk.replay.megatron.shard_of`.

        Args:
            model: a module, wrapped or not, or the list of chunks of a virtual pipeline.
            layout: the model's layout, where the modules alone do not tell it.

        Raises:
            ModuleNotFoundError: megatron-core is not installed.
            ShardError: the modules contradict each other or the layout.
        """
        from rtk.replay.live import megatron

        return megatron.shard_of(model, layout)

    def __repr__(self) -> str:
        always = ("layout", "pipeline_size", "pipeline_rank")
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name in always or getattr(self, field.name) != field.default
        ]
        return f"Shard({', '.join(shown)})"

    def __str__(self) -> str:
        parts = [f"pipeline stage {self.pipeline_rank} of {self.pipeline_size}"]
        for kind in ("context", "tensor", "expert"):
            if (size := getattr(self, f"{kind}_size")) > 1:
                parts.append(f"{kind} rank {getattr(self, f'{kind}_rank')} of {size}")
        return ", ".join(parts)
