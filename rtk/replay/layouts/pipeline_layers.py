"""Which layers stand in which model chunk: Megatron's ways of cutting a model into pipeline stages.

A pipeline of `pipeline_size` ranks with `virtual_size` chunks on each runs through its chunks in the order
of virtual stage, then rank: with two ranks and two chunks, rank 0's first, rank 1's first, rank 0's
second, rank 1's second. All functions here return chunks in that order. The rules are those of
megatron-core's `get_num_layers_to_build`, `get_transformer_layer_offset` and `PipelineParallelLayerLayout`.
"""

from __future__ import annotations

import re

from rtk.errors import ShardError

# Megatron unrolls groups first and single elements after; neither nests.
_GROUP = re.compile(r"\(([^()]+)\)\*(\d{1,4})")
_ELEMENT = re.compile(r"([EtmL|])\*(\d{1,4})")


def even(num_layers: int, pipeline_size: int, virtual_size: int, *, embedding: bool, loss: bool) -> list[int]:
    """Layers of each chunk where all get as many, the embedding and the loss counting as a layer or not."""
    chunks, total = pipeline_size * virtual_size, num_layers + embedding + loss
    counted = " and the embedding" * embedding + " and the loss" * loss
    if total % chunks:
        virtual = f" of {virtual_size} virtual chunks each" if virtual_size > 1 else ""
        raise ShardError(
            f"{num_layers} layers{counted} do not divide evenly over {pipeline_size} pipeline stages{virtual}; "
            "choose sizes that divide them, or say which stages hold fewer: num_layers_in_first_pipeline_stage, "
            "num_layers_in_last_pipeline_stage or pipeline_layout"
        )
    sizes = [total // chunks] * chunks
    sizes[0] -= embedding
    sizes[-1] -= loss
    if min(sizes) < 0:
        raise ShardError(f"{num_layers} layers{counted} are too few for {chunks} chunks")
    return sizes


def uneven(
    num_layers: int, pipeline_size: int, virtual_size: int, *, first: int | None, last: int | None
) -> list[int]:
    """Layers of each chunk where the first or the last pipeline stage holds a number of its own."""
    for name, count in (("first", first), ("last", last)):
        if count is not None and count < 1:
            raise ShardError(f"num_layers_in_{name}_pipeline_stage is {count}; it is at least 1")
    if pipeline_size < 2:
        raise ShardError(
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage need a pipeline_size of 2 "
            "or more: with one stage there is nothing to divide"
        )
    ranks: list[int | None] = [None] * pipeline_size
    ranks[0], ranks[-1] = first, last
    middle = ranks.count(None)
    left = num_layers - (first or 0) - (last or 0)
    if left < 0 or bool(left) != bool(middle) or (middle and left % middle):
        raise ShardError(
            f"of {num_layers} layers, {left} are left for the {middle} other pipeline stages, which need an equal "
            "number of at least one each"
        )
    if not middle and virtual_size > 1:
        raise ShardError(
            "megatron-core (0.16 to 0.19) divides by zero where both stages of a pipeline of 2 have a number of "
            "their own and hold virtual stages; give one of the two numbers, or a pipeline_layout"
        )
    counts = [left // middle if count is None else count for count in ranks]
    for rank, count in enumerate(counts):
        if count % virtual_size:
            raise ShardError(
                f"the {count} layers of pipeline stage {rank} do not divide over virtual_size {virtual_size} chunks"
            )
    return [count // virtual_size for count in counts] * virtual_size


def parse(text: str) -> list[str]:
    """The elements of each chunk in a `pipeline_model_parallel_layout` string.

    `E` is the embedding, `t` a transformer layer, `m` an MTP layer, `L` the loss, `|` ends a chunk, commas
    mean nothing; `x*n` repeats an element and `(...)*n` a group.

    Raises:
        ShardError: something else stands in the string.
    """
    unrolled = text.replace(",", "")
    for repeated in (_GROUP, _ELEMENT):
        unrolled = repeated.sub(lambda match: match[1] * int(match[2]), unrolled)
    if strange := re.search(r"[^EtmL|]", unrolled):
        raise ShardError(
            f"cannot read {strange[0]!r} in pipeline_layout {text!r}: elements are E (embedding), t (transformer "
            "layer), m (MTP layer), L (loss) and | (next stage), repeated as t*3 or (tt|)*3"
        )
    return unrolled.split("|")


def check_layout(
    chunks: list[str], text: str, *, num_layers: int, mtp_layers: int, pipeline_size: int
) -> None:
    """Hold a parsed layout to the rules of Megatron's `validate_layer_layout`.

    Raises:
        ShardError: the layout is not one of this model, or not one that Megatron would build.
    """

    def refuse(why: str) -> None:
        raise ShardError(f"pipeline_layout {text!r} {why}")

    if len(chunks) % pipeline_size:
        refuse(f"has {len(chunks)} stages, which do not divide over {pipeline_size} pipeline ranks")
    flat = "".join(chunks)
    if not flat.startswith("E") or flat.count("E") != 1:
        refuse("must start with the embedding E, and hold it once")
    if not flat.endswith("L") or flat.count("L") != 1:
        refuse("must end with the loss L, and hold it once")
    if flat.count("t") != num_layers:
        refuse(f"has {flat.count('t')} transformer layers t, the model {num_layers}")
    if flat.count("m") != mtp_layers:
        refuse(f"has {flat.count('m')} MTP layers m, while mtp_layers is {mtp_layers}")
    if mtp_layers:
        if "t" in flat[flat.index("m") :]:
            refuse("has a transformer layer t after an MTP layer m")
        stage = next(index for index, chunk in enumerate(chunks) if "m" in chunk)
        if chunks[stage].count("m") != mtp_layers:
            refuse("spreads the MTP layers m over several stages; Megatron keeps them in one")
        if stage < len(chunks) - pipeline_size:
            refuse("has MTP layers m before the last virtual stage of their rank")
