"""Replay over several microbatches on real megatron-core modules, recomputed by Megatron's own checkpoint function."""

from __future__ import annotations

import contextlib
import dataclasses
import types

import numpy as np
import pytest

from rtk.errors import ShardError
from rtk.replay import ExpandedRoutes

pytestmark = pytest.mark.megatron
torch = pytest.importorskip("torch", reason="needs moe-rtk[megatron]")
pytest.importorskip("megatron.core", reason="needs moe-rtk[megatron]")

from rtk.replay import session  # noqa: E402
from tests.replay.conftest import megatron_model  # noqa: E402
from tests.replay.live import ranks  # noqa: E402

NUMBERS = (2, 3, 4)
TOKENS = 9
NO_PADDING = np.zeros(TOKENS, bool)
POSITIONS = torch.arange(TOKENS)
FUTURE = (POSITIONS[None, :] > POSITIONS[:, None])[None, None]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
# F and B are the forward and the backward pass of a microbatch.
ORDERS = {
    "one after the other": "F0 B0 F1 B1 F2 B2",
    "1F1B": "F0 F1 B0 F2 B1 B2",
    "all forward, all backward": "F0 F1 F2 B0 B1 B2",
    "last first": "F0 F1 F2 B2 B1 B0",
}


@pytest.fixture(scope="module")
def models(gloo):
    return {
        "full": megatron_model(**FULL),
        "selective": megatron_model(**SELECTIVE),
        "none": megatron_model(),
    }


def microbatch(seed):
    """Tokens, and for each router routes that no router chose."""
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.integers(0, 64, TOKENS))[None]
    ids = [[rng.choice(8, 2, replace=False) for _ in range(TOKENS)] for _ in NUMBERS]
    return types.SimpleNamespace(
        tokens=tokens,
        routes=ExpandedRoutes(tuple(np.array(layer, np.int32) for layer in ids), NUMBERS, NO_PADDING),
    )


BATCHES = [microbatch(seed) for seed in range(3)]


def forward(model, batch, **options):
    return model(batch.tokens, POSITIONS[None], FUTURE, **options)


def loss(output):
    return output.square().mean()


def gradients(model):
    result = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return result


def routers_of(model):
    from rtk.replay import megatron

    return megatron.routers(model)


def is_clean(model):
    return all(
        replay.router_replay_action is None
        and replay.target_topk_idx is None
        and replay.recorded_topk_idx is None
        and replay.replay_backward_list == []
        for replay in (router.router_replay for router in routers_of(model))
    )


@contextlib.contextmanager
def watching(model):
    """Where each router sends each token, in order of its runs: (layer, is a recompute, bool [tokens, experts])."""
    seen = []

    def see(router, _inputs, output):
        in_backward = torch._C._current_graph_task_id() != -1
        seen.append((router.layer_number, in_backward, output[1].clone()))

    handles = [router.register_forward_hook(see) for router in routers_of(model)]
    yield seen
    for handle in handles:
        handle.remove()


def sent_as(batch, number, routing_map):
    ids = batch.routes.tensors[NUMBERS.index(number)]
    wanted = np.zeros((TOKENS, 8), bool)
    np.put_along_axis(wanted, ids.astype(np.int64), True, axis=1)
    return np.array_equal(routing_map.numpy(), wanted)


def run(replay, model, order):
    """The passes of a schedule; which microbatch each one is of."""
    outputs, steps = {}, []
    for step in order.split():
        number = int(step[1:])
        steps.append(number)
        if step[0] == "F":
            with replay.microbatch(BATCHES[number].routes):
                outputs[number] = forward(model, BATCHES[number])
        else:
            loss(outputs.pop(number)).backward()
        assert is_clean(model)
    return steps


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_each_recompute_gets_the_routes_of_its_own_microbatch(models, kind, order):
    model = models[kind]
    with watching(model) as seen, session(model) as replay:
        steps = run(replay, model, order)
    assert [in_backward for _, in_backward, _ in seen] == [
        step[0] == "B" for step in order.split() for _ in NUMBERS
    ]
    for number, (layer, _, routing_map) in zip([n for n in steps for _ in NUMBERS], seen, strict=True):
        assert sent_as(BATCHES[number], layer, routing_map)
    assert (replay.forwards, replay.recomputes) == (9, 9)
    got = gradients(model)
    # The same weights without recompute, one microbatch after the other: the gradients that are due.
    with session(models["none"]) as plain:
        run(plain, models["none"], ORDERS["one after the other"])
    assert (plain.forwards, plain.recomputes) == (9, 0)
    for name, expected in gradients(models["none"]).items():
        torch.testing.assert_close(got[name], expected, msg=name)


def test_a_backward_pass_inside_the_block_of_another_microbatch(models):
    model = models["full"]
    with watching(model) as seen, session(model) as replay:
        with replay.microbatch(BATCHES[0].routes):
            first = forward(model, BATCHES[0])
        with replay.microbatch(BATCHES[1].routes):
            second = forward(model, BATCHES[1])
            loss(first).backward()
        loss(second).backward()
    recomputed = [(layer, routing_map) for layer, in_backward, routing_map in seen if in_backward]
    for number, (layer, routing_map) in zip([0] * 3 + [1] * 3, recomputed, strict=True):
        assert sent_as(BATCHES[number], layer, routing_map)
    model.zero_grad()


def test_one_backward_pass_over_several_microbatches(models):
    model = models["full"]
    with watching(model) as seen, session(model) as replay:
        losses = []
        for batch in BATCHES:
            with replay.microbatch(batch.routes):
                losses.append(loss(forward(model, batch)))
        sum(losses).backward()
    recomputed = [(layer, routing_map) for layer, in_backward, routing_map in seen if in_backward]
    for number, (layer, routing_map) in zip([2] * 3 + [1] * 3 + [0] * 3, recomputed, strict=True):
        assert sent_as(BATCHES[number], layer, routing_map)
    model.zero_grad()


def test_a_checkpoint_that_is_not_reentrant_is_a_recompute_too(models):
    from torch.utils.checkpoint import checkpoint

    model = models["none"]
    layers = list(model.decoder.layers)

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, hidden):
            for layer in self.layers:
                hidden = checkpoint(lambda h, layer=layer: layer(h, FUTURE)[0], hidden, use_reentrant=False)
            return hidden

    chunk = Checkpointed()
    inputs = torch.randn(TOKENS, 1, 32)
    with watching(model) as seen, session(chunk) as replay:
        outputs = []
        for batch in BATCHES[:2]:
            with replay.microbatch(batch.routes):
                outputs.append(chunk(inputs))
        for output in outputs:
            loss(output).backward()
    model.zero_grad()
    assert [in_backward for _, in_backward, _ in seen] == [False] * 6 + [True] * 6
    for number, (layer, _, routing_map) in zip([0] * 3 + [1] * 3 + [0] * 3 + [1] * 3, seen, strict=True):
        assert sent_as(BATCHES[number], layer, routing_map)


def upstream_step(model, batch, *, grad=True):
    """What Megatron's own interface offers: install, forward, and the other action for the backward pass."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    replays = [router.router_replay for router in routers_of(model)]
    for replay, ids in zip(replays, batch.routes.tensors, strict=True):
        replay.set_target_indices(torch.from_numpy(ids))
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with torch.set_grad_enabled(grad):
        output = forward(model, batch)
    for replay in replays:
        replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    if grad:
        loss(output).backward()
    return [len(replay.replay_backward_list) for replay in replays]


@pytest.fixture
def cleared(models):
    yield
    for model in models.values():
        for router in routers_of(model):
            router.router_replay.clear_router_replay_action()
            router.router_replay.clear_indices()
        model.zero_grad()


def test_upstreams_list_grows_where_nothing_is_recomputed(models, cleared):
    assert [upstream_step(models["none"], batch) for batch in BATCHES] == [[1] * 3, [2] * 3, [3] * 3]
    # The session finds it, says so and starts afresh; nothing is left of its own steps.
    with pytest.warns(UserWarning, match="layer 2 had the action .*REPLAY_BACKWARD and 3 routes"):
        with session(models["none"]) as replay:
            run(replay, models["none"], ORDERS["1F1B"])
    assert is_clean(models["none"])


def test_after_a_forward_only_pass_upstream_recomputes_with_its_routes(models, cleared):
    """Report 13, SkyRL #1908, and the same steps in a session."""
    model = models["full"]
    assert upstream_step(model, BATCHES[0], grad=False) == [1] * 3
    with watching(model) as seen:
        assert upstream_step(model, BATCHES[1]) == [1] * 3
    recomputed = [(layer, routing_map) for layer, in_backward, routing_map in seen if in_backward]
    assert len(recomputed) == 3
    assert all(sent_as(BATCHES[0], layer, routing_map) for layer, routing_map in recomputed)

    for router in routers_of(model):
        router.router_replay.clear_router_replay_action()
        router.router_replay.clear_indices()
    with watching(model) as seen, session(model) as replay:
        with torch.no_grad(), replay.microbatch(BATCHES[0].routes):
            forward(model, BATCHES[0])
        with replay.microbatch(BATCHES[1].routes):
            output = forward(model, BATCHES[1])
        loss(output).backward()
    recomputed = [(layer, routing_map) for layer, in_backward, routing_map in seen if in_backward]
    assert len(recomputed) == 3
    assert all(sent_as(BATCHES[1], layer, routing_map) for layer, routing_map in recomputed)
    assert is_clean(model)


def test_chunks_of_a_virtual_pipeline_each_have_their_own_backward_pass(models):
    """Two chunks of a rank, interleaved as a virtual pipeline does: B of a microbatch starts with its last chunk."""
    model = models["full"]
    pairs = [model.decoder.layers[:2], model.decoder.layers[2:]]

    class Chunk(torch.nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, hidden):
            from megatron.core.tensor_parallel import checkpoint

            for layer in self.layers:
                hidden = checkpoint(lambda h, layer=layer: layer(h, FUTURE)[0], False, hidden)
            return hidden

    chunks = [Chunk(layers) for layers in pairs]
    ends = {}
    with watching(model) as seen, session(chunks) as replay:
        for chunk, number in [(0, 0), (0, 1), (1, 0), (1, 1)]:
            with replay.microbatch(BATCHES[number].routes):
                inputs = torch.randn(TOKENS, 1, 32, requires_grad=True)
                ends[chunk, number] = chunks[chunk](inputs)
        order = [(1, 0), (0, 0), (1, 1), (0, 1)]
        for place in order:
            loss(ends[place]).backward()
    model.zero_grad()
    recomputed = [(layer, routing_map) for layer, in_backward, routing_map in seen if in_backward]
    expected = [number for chunk, number in order for _ in ("34" if chunk else "2")]
    assert [layer for layer, _ in recomputed] == [4, 3, 2, 4, 3, 2]
    for number, (layer, routing_map) in zip(expected, recomputed, strict=True):
        assert sent_as(BATCHES[number], layer, routing_map)


def test_everything_is_clean_after_an_exception(models):
    model = models["full"]
    with pytest.raises(RuntimeError, match="out of memory"), session(model) as replay:
        with replay.microbatch(BATCHES[0].routes):
            forward(model, BATCHES[0])
            raise RuntimeError("out of memory")
    assert is_clean(model)

    def broken(_router, _inputs):
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("in the recompute")

    # After the session's own hook, so that the action stands when the router breaks.
    with pytest.raises(RuntimeError, match="in the recompute"), session(model) as replay:
        handle = routers_of(model)[1].register_forward_pre_hook(broken)
        with replay.microbatch(BATCHES[0].routes):
            output = forward(model, BATCHES[0])
        try:
            loss(output).backward()
        finally:
            handle.remove()
    assert is_clean(model)
    model.zero_grad()
    with session(model):  # what other code did to the routers in the meantime goes as well
        for router in routers_of(model):
            router.router_replay.set_target_indices(torch.zeros(TOKENS, 2, dtype=torch.int32))
    assert is_clean(model)
    with session(model) as replay:  # and the next one works
        run(replay, model, ORDERS["1F1B"])
    model.zero_grad()


def test_sessions_and_recordings_do_not_nest(models):
    from rtk.replay import megatron

    model = models["none"]
    with session(model) as replay:
        for other in (
            session(model),
            megatron.recording(model),
            megatron.replaying(model, BATCHES[0].routes),
        ):
            with (
                pytest.raises(ShardError, match=r"layers \[2, 3, 4\] are in a replay session .* already"),
                other,
            ):
                pass
        with session(models["full"]):  # another model is nobody's business
            pass
        with replay.microbatch(BATCHES[0].routes), pytest.raises(ShardError, match="do not nest"):
            with replay.microbatch(BATCHES[1].routes):
                pass
    with session(model):
        pass
    with pytest.raises(ShardError, match="is closed"), replay.microbatch(BATCHES[0].routes):
        pass


def test_upstream_takes_too_few_rows_and_sends_the_last_tokens_nowhere(models, cleared):
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    router = routers_of(models["none"])[0]
    router.router_replay.set_target_indices(torch.from_numpy(BATCHES[0].routes.tensors[0][:-1]))
    router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with torch.no_grad():
        _, routing_map = router(torch.randn(TOKENS, 1, 32))
    assert routing_map.sum(1).tolist() == [2] * (TOKENS - 1) + [0]


def test_a_router_without_routes_does_not_choose_by_itself(models):
    model = models["full"]
    with session(model) as replay:
        with pytest.raises(ShardError, match="layer 2 runs in a replay session and has no routes"):
            forward(model, BATCHES[0])
        with pytest.raises(ShardError, match="layer 2 meets 9 tokens and has routes for 8"):
            short = tuple(ids[:-1] for ids in BATCHES[0].routes.tensors)
            with replay.microbatch(ExpandedRoutes(short, NUMBERS, NO_PADDING)):
                forward(model, BATCHES[0])
        with pytest.raises(ShardError, match=r"the routers of layers \[1, 2, 3\].*are of layers \[2, 3, 4\]"):
            with replay.microbatch(ExpandedRoutes(BATCHES[0].routes.tensors, (1, 2, 3), NO_PADDING)):
                pass
    assert is_clean(model)


def test_recomputes_of_other_forward_passes_are_refused(models):
    model = models["full"]
    before = forward(model, BATCHES[0])
    with session(model) as replay:
        with replay.microbatch(BATCHES[1].routes):
            inside = forward(model, BATCHES[1])
        loss(inside).backward()
        with pytest.raises(
            ShardError, match="layer 4 is recomputed for a forward pass that this session has not"
        ):
            loss(before).backward()
        with replay.microbatch(BATCHES[2].routes):
            late = forward(model, BATCHES[2])
    with pytest.raises(ShardError, match="began after its replay session was closed"):
        loss(late).backward()
    # Without recompute there is nothing that could choose otherwise.
    with session(models["none"]) as replay, replay.microbatch(BATCHES[2].routes):
        late = forward(models["none"], BATCHES[2])
    loss(late).backward()
    for each in models.values():
        each.zero_grad()


def test_traces_are_expanded_for_the_live_shard(models, gloo):
    from rtk import ModelLayout, RouteTrace

    batch = BATCHES[0]
    routes = np.zeros((TOKENS, 4, 2), np.uint8)
    for layer, ids in zip((1, 2, 3), batch.routes.tensors, strict=True):
        routes[:, layer] = ids
    tokens = np.append(batch.tokens[0].numpy(), 7)
    trace = RouteTrace(tokens, ("x",) * len(tokens), 4, routes, ModelLayout(4, (1, 2, 3), 8, 2))
    with watching(models["none"]) as seen, session(models["none"]) as replay:
        with replay.microbatch(trace):
            forward(models["none"], batch)
    assert all(sent_as(batch, layer, routing_map) for layer, _, routing_map in seen)
    assert len(seen) == 3


@pytest.mark.parametrize("settings", [{}, FULL], ids=["kept", "recomputed"])
def test_mtp_routers_replay_their_own_routes_or_choose(gloo, settings):
    from rtk.replay import megatron

    model = megatron_model(mtp_num_layers=2, **settings)
    assert megatron.router_layer_numbers(model) == NUMBERS
    assert list(megatron.mtp_depths(model).values()) == [1, 2]
    batch = BATCHES[0]
    options = {"labels": batch.tokens, "loss_mask": torch.ones(1, TOKENS)}
    with watching(model) as seen, session(model) as replay:
        with replay.microbatch(batch.routes):
            output = forward(model, batch, **options)
        output.mean().backward()
    backbone = [entry for entry in seen if entry[0] in NUMBERS]
    mtp = [entry for entry in seen if entry[0] not in NUMBERS]
    runs = 2 if settings else 1
    assert len(backbone) == 3 * runs
    assert all(sent_as(batch, layer, routing_map) for layer, _, routing_map in backbone)
    assert [layer for layer, _, _ in mtp] == ([5, 6, 6, 5] if settings else [5, 6])
    assert not any(sent_as(batch, 2, routing_map) for _, _, routing_map in mtp)
    assert is_clean(model)
    # With routes of their own, by depth, they replay them.
    own = microbatch(7).routes.tensors[:2]
    both = dataclasses.replace(batch.routes, mtp_tensors=own, mtp_numbers=(1, 2))
    with watching(model) as seen, session(model) as replay:
        with replay.microbatch(both):
            output = forward(model, batch, **options)
        output.mean().backward()
    for layer, _, routing_map in seen:
        ids = both.tensors[layer - 2] if layer < 5 else own[layer - 5]
        wanted = torch.zeros_like(routing_map).scatter(1, torch.from_numpy(ids).long(), True)
        assert torch.equal(routing_map, wanted)
    assert len(seen) == 5 * runs
    with session(model) as replay, pytest.raises(ShardError, match=r"depths \[1\], .* at depths \[1, 2\]"):
        with replay.microbatch(dataclasses.replace(both, mtp_tensors=own[:1], mtp_numbers=(1,))):
            pass


# Megatron's layer numbers of each rank's routers: 8 layers, the first dense.
SCHEDULES = {"1F1B": (1, [(2, 3, 4), (5, 6, 7, 8)]), "interleaved 1F1B": (2, [(2, 5, 6), (3, 4, 7, 8)])}


@pytest.mark.parametrize("mode", ["train", "forward-only"])
@pytest.mark.parametrize(("virtual_size", "numbers"), SCHEDULES.values(), ids=SCHEDULES)
def test_megatrons_own_schedules_on_two_ranks(tmp_path, virtual_size, numbers, mode):
    answers = ranks.run("tests.replay.live.schedule_worker", 2, tmp_path, str(virtual_size), mode)
    for own, answer in zip(numbers, answers, strict=True):
        assert answer["clean"]
        kinds = "F" if mode == "forward-only" else "FB"
        assert answer["counts"] == [4 * len(own), 4 * len(own) * (len(kinds) - 1)]
        for layer in own:
            for kind in kinds:
                followed = [n for k, number, n in answer["events"] if (k, number) == (kind, layer)]
                assert followed == [0, 1, 2, 3], (kind, layer)
        # The microbatches were really in flight at once: on the first rank the second's forward pass comes
        # before the first's backward pass.
    order = [(kind, n) for kind, number, n in answers[0]["events"] if number == 2]
    if mode == "train":
        assert order.index(("F", 1)) < order.index(("B", 0))
