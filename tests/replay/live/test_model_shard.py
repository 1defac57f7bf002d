"""What is read off live modules: every rank of larger layouts, built one after the other in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import types

import numpy as np
import pytest

from rtk import ModelLayout, RouteTrace
from rtk.errors import LayoutError, ShardError
from rtk.replay import Shard, check

pytestmark = pytest.mark.megatron
torch = pytest.importorskip("torch", reason="needs moe-rtk[megatron]")
pytest.importorskip("megatron.core", reason="needs moe-rtk[megatron]")

from rtk.replay import session  # noqa: E402
from tests.replay.conftest import megatron_model  # noqa: E402

SMALL = {"hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2, "moe_ffn_hidden_size": 8}
# Dense layers at both ends of stages, in the middle of them, and two in a row.
PATTERN = [0, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1]


@dataclasses.dataclass
class Group:
    """Stands for a process group of which this process is one rank."""

    ranks: int
    own: int

    def size(self):
        return self.ranks

    def rank(self):
        return self.own


@contextlib.contextmanager
def place(pipeline=(1, 0), virtual_size=None, **groups):
    """Make megatron-core take this process for a rank of a larger job; yields its process groups."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    collection = ProcessGroupCollection.use_mpu_process_groups()
    collection.pp = Group(*pipeline)
    for name, where in groups.items():
        setattr(collection, name, Group(*where))
    parallel_state.set_pipeline_model_parallel_world_size(pipeline[0])
    parallel_state.set_pipeline_model_parallel_rank(pipeline[1])
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual_size)
    try:
        yield collection
    finally:
        parallel_state.set_pipeline_model_parallel_world_size(None)
        parallel_state.set_pipeline_model_parallel_rank(None)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


def build(rank, size, virtual_size, **settings):
    with place((size, rank), virtual_size) as groups:
        return [
            megatron_model(
                pg_collection=groups,
                vp_stage=stage if virtual_size else None,
                pipeline_model_parallel_size=size,
                virtual_pipeline_model_parallel_size=virtual_size,
                **SMALL,
                **settings,
            )
            for stage in range(virtual_size or 1)
        ]


@pytest.fixture
def no_tying(gloo, monkeypatch):
    """The embedding of an MTP layer is tied to the first stage's by a copy to a GPU and a reduction."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    monkeypatch.setattr(LanguageModule, "setup_embeddings_and_output_layer", lambda self: None)


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
# PP, VPP, layers, MTP depth, Megatron's settings of the pipeline split.
JOBS = {
    "even": (4, None, 24, 0, {}),
    "even, virtual": (4, 2, 24, 0, {}),
    "uneven first and last, virtual, MTP": (4, 2, 24, 2, {FIRST: 4, LAST: 8}),
    "uneven first": (4, None, 22, 0, {FIRST: 4}),
    "uneven last, three chunks": (2, 3, 24, 1, {LAST: 9}),
    "embedding and loss count, virtual": (4, 2, 22, 1, {EMBEDDING: True, LOSS: True}),
    "a layout string, with an empty stage": (4, 2, 9, 2, {"pipeline_layout": "Et|tt|t|t|tt||t|tmmL"}),
}


@pytest.mark.parametrize(("size", "virtual", "layers", "mtp", "split"), JOBS.values(), ids=JOBS)
def test_every_rank_of_a_job_by_construction(no_tying, size, virtual, layers, mtp, split):
    from rtk.replay import megatron

    pattern = PATTERN[:layers]
    layout = ModelLayout(layers, tuple(i for i, is_moe in enumerate(pattern) if is_moe), 8, 2)
    settings = dict(split)
    if "pipeline_layout" in settings:
        settings["pipeline_model_parallel_layout"] = settings.pop("pipeline_layout")
    seen, mtp_seen = [], []
    for rank in range(size):
        chunks = build(
            rank,
            size,
            virtual,
            num_layers=layers,
            moe_layer_freq=pattern,
            mtp_num_layers=mtp or None,
            **settings,
        )
        by_hand = Shard(layout, size, rank, virtual_size=virtual or 1, mtp_layers=mtp, **split)
        # What Megatron built, module by module.
        numbers = tuple(tuple(layer.layer_number for layer in chunk.decoder.layers) for chunk in chunks)
        routed = tuple(
            layer.mlp.router.layer_number
            for chunk in chunks
            for layer in chunk.decoder.layers
            if hasattr(layer.mlp, "router")
        )
        assert by_hand.chunks == numbers
        assert by_hand.router_layer_numbers == routed == megatron.router_layer_numbers(chunks)
        assert by_hand.mtp_router_numbers == tuple(megatron.mtp_depths(chunks).values())
        assert Shard.from_megatron(chunks) == by_hand
        seen += [number for chunk in numbers for number in chunk]
        mtp_seen += by_hand.mtp_router_numbers
    assert sorted(seen) == list(range(1, layers + 1))
    assert mtp_seen == list(range(1, mtp + 1))


def test_ranks_and_groups_are_those_of_the_modules(gloo, monkeypatch):
    from rtk.replay import megatron

    with place(ep=(2, 1)) as groups:
        model = megatron_model(
            pg_collection=groups,
            expert_model_parallel_size=2,
            moe_router_num_groups=4,
            moe_router_group_topk=2,
            **SMALL,
        )
    shard = megatron.shard_of(model)
    assert (shard.expert_size, shard.expert_rank) == (2, 1)
    assert (shard.tensor_size, shard.context_size, shard.sequence_parallel) == (1, 1, False)
    assert megatron.routing_groups(model) == (4, 2)
    assert megatron.routing_groups(megatron_model(**SMALL)) is None
    # Modules for TP with sequence parallelism and for CP want Transformer Engine. What is read off them are
    # the config and the groups, which can be had without.
    for name, value in {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "context_parallel_size": 4,
    }.items():
        monkeypatch.setattr(model.config, name, value)
    monkeypatch.setattr(groups, "tp", Group(2, 1))
    monkeypatch.setattr(groups, "cp", Group(4, 2))
    shard = megatron.shard_of(model)
    assert (shard.tensor_size, shard.tensor_rank, shard.sequence_parallel) == (2, 1, True)
    assert (shard.context_size, shard.context_rank, shard.context_order) == (4, 2, "zigzag")
    monkeypatch.setattr(groups, "tp", Group(4, 1))
    with pytest.raises(ShardError, match="the tp process group has 4 ranks while the config says 2"):
        megatron.shard_of(model)


@pytest.mark.parametrize(
    ("frequency", "moe_layers"), [(1, (0, 1, 2, 3)), (2, (0, 2)), (3, (0, 3)), ([0, 0, 1, 0], (2,))]
)
def test_moe_layer_freq_as_megatron_understands_it(gloo, frequency, moe_layers):
    from rtk.replay import megatron

    assert (
        megatron.shard_of(megatron_model(moe_layer_freq=frequency, **SMALL)).layout.moe_layers == moe_layers
    )


def test_wrapped_models(gloo):
    from megatron.core.transformer.module import Float16Module

    from rtk.replay import megatron

    model = megatron_model(**SMALL)
    wrapped = Float16Module(dataclasses.replace(model.config, bf16=True), model)
    assert megatron.shard_of(wrapped) == megatron.shard_of([wrapped]) == megatron.shard_of(model)


def test_modules_that_contradict_themselves_or_the_layout(gloo, monkeypatch):
    from rtk.replay import megatron

    chunks = build(0, 2, 2, num_layers=8, moe_layer_freq=[0] + [1] * 7)
    assert megatron.shard_of(chunks).chunks == ((1, 2), (5, 6))
    with pytest.raises(ShardError, match="1 model chunks while virtual_pipeline_model_parallel_size is 2"):
        megatron.shard_of(chunks[0])
    with pytest.raises(ShardError, match="empty list"):
        megatron.shard_of([])
    with pytest.raises(ShardError, match=r"chunk 0 holds layers \[5, 6\].*put layers \[1, 2\] there"):
        megatron.shard_of(chunks[::-1])
    with pytest.raises(ShardError, match="holds no megatron-core module"):
        megatron.shard_of(torch.nn.Linear(2, 2))
    for layout, says in (
        (ModelLayout(8, (0, 1, 2, 3, 4, 5, 6), 8, 2), r"routers in layers \[2, 5, 6\].*says \[1, 2, 5, 6\]"),
        (
            ModelLayout(8, (1, 2, 3, 4, 5, 6, 7), 8, 3),
            "layer 2 chooses 2 of 8 experts, the layout says 3 of 8",
        ),
        (
            ModelLayout(8, (1, 2, 3, 4, 5, 6, 7), 16, 2),
            "layer 2 chooses 2 of 8 experts, the layout says 2 of 16",
        ),
    ):
        with pytest.raises(ShardError, match=says):
            megatron.shard_of(chunks, layout)
    monkeypatch.setattr(chunks[0].config, "moe_layer_freq", [0, 1])
    with pytest.raises(LayoutError, match="moe_layer_freq"):
        megatron.shard_of(chunks)
    monkeypatch.setattr(chunks[0].config, "num_moe_experts", None)
    with pytest.raises(ShardError, match="no MoE model"):
        megatron.shard_of(chunks)


def test_an_mtp_router_numbered_like_the_backbones_is_not_taken_for_one(gloo):
    """Report 11, NeMo RL #3903: 0.16.1 counts on past the backbone, other versions start again from 1."""
    from rtk.replay import megatron

    model = megatron_model(mtp_num_layers=1, moe_layer_freq=1, **SMALL)
    (router,) = megatron.mtp_depths(model)
    assert router.layer_number == 5
    router.set_layer_number(1)
    assert megatron.router_layer_numbers(model) == (1, 2, 3, 4)
    shard = megatron.shard_of(model)
    assert shard.router_layer_numbers == (1, 2, 3, 4)
    assert shard.mtp_router_numbers == (1,)
    with megatron.recording(model) as recorded, torch.no_grad():
        own = [each(torch.randn(5, 1, 8))[1] for each in megatron.routers(model)]
    assert list(recorded) == [1, 2, 3, 4, 5]
    assert all(
        torch.equal(torch.zeros_like(routing_map).scatter(1, ids, True), routing_map)
        for routing_map, ids in zip(own, recorded.values(), strict=True)
    )
    # The check counts MTP layers as the record does.
    ids = {number: chosen.numpy() for number, chosen in recorded.items()}
    backbone = np.stack([ids[number] for number in (1, 2, 3, 4)], axis=1)
    trace = RouteTrace(range(6), ("x",) * 6, 3, backbone, shard.layout)
    routes = {"mtp_routes": [ids[5][:, None]]}
    assert check(trace, shard, recorded=ids, **routes).ok
    report = check(trace, shard, tensors=[*backbone.transpose(1, 0, 2), backbone[:, 0]], **routes)
    assert report.fault == "MTP layers"


def graphed(*scopes):
    return {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_scope": [types.SimpleNamespace(name=scope) for scope in scopes],
    }


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"moe_router_fusion": True}, "moe_router_fusion=True"),
        ({"moe_expert_capacity_factor": 1.5}, r"moe_expert_capacity_factor=1\.5 drops tokens"),
        (graphed(), "cuda_graph_impl='transformer_engine' captures the router"),
        (graphed("attn", "moe_router"), "cuda_graph_impl='transformer_engine' captures the router"),
    ],
)
def test_a_router_that_would_ignore_its_routes_is_refused(gloo, monkeypatch, settings, says):
    from rtk.replay import megatron

    model = megatron_model(**SMALL)
    for name, value in settings.items():
        monkeypatch.setattr(megatron.routers(model)[0].config, name, value)
    for use in (session, megatron.recording):
        with pytest.raises(ShardError, match=f"layer 2 would ignore its RouterReplay: {says}"), use(model):
            pass


def test_graphs_without_the_router_are_fine(gloo, monkeypatch):
    from rtk.replay import megatron

    model = megatron_model(**SMALL)
    for name, value in graphed("attn").items():
        monkeypatch.setattr(model.config, name, value)
    with session(model):
        pass
    assert len(megatron.routers(model)) == 3


def test_sinkhorn_routing_never_asks_and_is_refused(gloo):
    """That upstream is silent about it is seen first, on real modules."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    from rtk.replay import megatron

    model = megatron_model(moe_router_load_balancing_type="sinkhorn", **SMALL)
    router = megatron.routers(model)[0]
    inputs = torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own = router.eval()(inputs)[1]
        # Experts that it did not choose; a router that asks would send the tokens there.
        router.router_replay.set_target_indices((~own).int().topk(2, dim=1).indices)
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        assert torch.equal(router(inputs)[1], own)
    megatron.clear(router.router_replay)
    with pytest.raises(ShardError, match=r"layer 2 would ignore .*'sinkhorn'"), session(model):
        pass


def test_token_dropping_undoes_a_replay_and_is_refused(gloo):
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    from rtk.replay import megatron

    model = megatron_model(moe_expert_capacity_factor=1.0, **SMALL)
    router = megatron.routers(model)[0]
    same = torch.tensor([[0, 1]] * 8)
    router.router_replay.set_target_indices(same)
    router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with torch.no_grad():
        # 8 tokens times 2 over 8 experts: an expert takes 2 tokens, and 6 of the 8 go nowhere.
        assert router(torch.randn(8, 1, 8))[1].sum() == 4
    megatron.clear(router.router_replay)
    with (
        pytest.raises(ShardError, match=r"layer 2 would ignore .*moe_expert_capacity_factor"),
        session(model),
    ):
        pass


def test_routers_without_replay_are_named(gloo):
    model = megatron_model(moe_enable_routing_replay=False, **SMALL)
    with (
        pytest.raises(ShardError, match=r"layer 2 has no RouterReplay.*moe_enable_routing_replay"),
        session(model),
    ):
        pass
