import json

import numpy as np
import pytest

from rtk import ModelLayout
from rtk.errors import LayoutError

# What the published config.json files say, cut to the keys that matter, and the MoE layers that the
# model cards and the transformers modeling code give for them.
QWEN3 = {
    "num_hidden_layers": 6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
}
MIXTRAL = {"num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "moe_layers", "num_experts", "top_k"),
    [
        (QWEN3, range(6), 128, 8),
        (QWEN3 | {"mlp_only_layers": [0, 4]}, [1, 2, 3, 5], 128, 8),
        (QWEN3 | {"decoder_sparse_step": 2}, [1, 3, 5], 128, 8),
        (DEEPSEEK_V3, range(3, 61), 256, 8),
        (
            DEEPSEEK_V3 | {"num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 2},
            [2, 4],
            256,
            8,
        ),
        (MIXTRAL, range(32), 8, 2),
        ({"text_config": MIXTRAL, "vision_config": {}}, range(32), 8, 2),
        (MIXTRAL | {"num_hidden_layers": 3, "moe_layer_freq": [0, 1, 1]}, [1, 2], 8, 2),
    ],
)
def test_reads_the_families_configs(config, moe_layers, num_experts, top_k):
    layout = ModelLayout.from_config(config)
    assert layout.moe_layers == tuple(moe_layers)
    assert (layout.num_experts, layout.top_k) == (num_experts, top_k)


def test_agrees_with_transformers_about_which_layers_are_sparse():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=7, mlp_only_layers=[0, 3], decoder_sparse_step=1, num_experts=4, num_experts_per_tok=2,
        hidden_size=16, intermediate_size=16, moe_intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=32,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    sparse = [i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    assert list(ModelLayout.from_config(config.to_dict()).moe_layers) == sparse


def test_dense_layers_are_the_others():
    assert ModelLayout(5, (1, 3), 4, 2).dense_layers == (0, 2, 4)


def test_reads_a_file_and_its_folder(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MIXTRAL))
    assert (
        ModelLayout.from_config(file)
        == ModelLayout.from_config(str(tmp_path))
        == ModelLayout.from_config(MIXTRAL)
    )


def test_dict_round_trip(layout):
    assert ModelLayout(**json.loads(json.dumps(layout.to_dict()))) == layout


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ((0, (0,), 4, 2), "num_layers is 0"),
        ((4, (), 4, 2), "moe_layers is empty"),
        ((4, (3, 1), 4, 2), "ascending"),
        ((4, (1, 4), 4, 2), "0..3"),
        ((4, (1,), 4, 5), "top_k is 5"),
    ],
)
def test_contradictions_are_named(fields, named):
    with pytest.raises(LayoutError, match=named):
        ModelLayout(*fields)


def test_dense_model_and_bad_files_are_named(tmp_path):
    with pytest.raises(LayoutError, match=r"model type 'llama'.*Mixture-of-Experts"):
        ModelLayout.from_config({"model_type": "llama", "num_hidden_layers": 2})
    with pytest.raises(LayoutError, match="cannot read"):
        ModelLayout.from_config(tmp_path / "missing.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LayoutError, match="is not JSON"):
        ModelLayout.from_config(tmp_path)


def from_frequency(frequency, num_layers=8):
    return ModelLayout.from_megatron(
        num_layers=num_layers, num_experts=4, moe_router_topk=2, moe_layer_freq=frequency
    )


@pytest.mark.parametrize(
    ("frequency", "moe_layers"),
    [
        (1, (0, 1, 2, 3, 4, 5, 6, 7)),
        (3, (0, 3, 6)),
        ("3", (0, 3, 6)),
        ([0, 1, 1, 1, 0, 1, 1, 1], (1, 2, 3, 5, 6, 7)),
        ("([0]*1+[1]*3)*2", (1, 2, 3, 5, 6, 7)),
        ("[0]*3+[1]*5", (3, 4, 5, 6, 7)),
        (" ([0] + [1,1]*2 + [0]*3) ", (1, 2, 3, 4)),
    ],
)
def test_reads_megatrons_moe_layer_freq(frequency, moe_layers):
    assert from_frequency(frequency) == ModelLayout(8, moe_layers, 4, 2)


def test_patterns_mean_what_python_makes_of_them():
    # Megatron's own --moe-layer-freq is evaluated as Python.
    random = np.random.default_rng(11)
    for _ in range(200):
        parts = [
            f"{random.choice(['[0]', '[1]', '[0,1]', '([1]*2+[0])'])}*{random.integers(1, 4)}"
            for _ in range(random.integers(1, 4))
        ]
        pattern = f"({'+'.join(parts)})*{random.integers(1, 3)}+[1]"
        meaning = eval(pattern)
        layout = from_frequency(pattern, len(meaning))
        assert [int(i in layout.moe_layers) for i in range(len(meaning))] == meaning, pattern


@pytest.mark.parametrize(
    ("frequency", "named"),
    [
        (0, "moe_layer_freq is 0"),
        ([1, 0], "has 2 entries for 8 layers"),
        ("[1]*7", "has 7 entries for 8 layers"),
        ([2] * 8, "a list of 0 and 1"),
        (True, "a list of 0 and 1"),
        (0.5, "a list of 0 and 1"),
        ("[1]*8 if True else 0", "cannot read moe_layer_freq"),
        ("__import__('os').getcwd()", "cannot read moe_layer_freq"),
        ("[1]*10**9", "cannot read moe_layer_freq"),
        ("[1]*999999999", "cannot read moe_layer_freq"),
        ("[1", "cannot read moe_layer_freq"),
        ("", "cannot read moe_layer_freq"),
        ("1+1", "cannot read moe_layer_freq"),
    ],
)
def test_what_is_no_moe_layer_freq_is_named(frequency, named):
    with pytest.raises(LayoutError, match=named):
        from_frequency(frequency)


@pytest.mark.megatron
@pytest.mark.parametrize("frequency", [1, 2, 3, [0, 1, 1, 0, 1, 0, 0, 1]])
def test_megatron_builds_moe_layers_where_the_layout_has_them(frequency):
    specs = pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=8, hidden_size=8, num_attention_heads=1, num_moe_experts=4, moe_layer_freq=frequency,
        add_bias_linear=False,
    )  # fmt: skip
    built = specs.get_gpt_decoder_layer_specs(config, use_transformer_engine=False)
    mlps = [spec.submodules.mlp for spec in built]
    # 0.16 holds the layer's class in a spec, later versions in a functools.partial.
    moe = [MoELayer in (getattr(mlp, "module", None), getattr(mlp, "func", None)) for mlp in mlps]
    assert from_frequency(frequency).moe_layers == tuple(i for i, is_moe in enumerate(moe) if is_moe)


BASE = {"num_hidden_layers": 6, "num_experts": 16, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("placement", "layers"),
    [
        # What transformers 5 writes for GLM-4 MoE lite and DeepSeek-V3.2, whose types win over the older key.
        ({"mlp_layer_types": ["dense"] + ["sparse"] * 5}, (1, 2, 3, 4, 5)),
        (
            {
                "first_k_dense_replace": 3,
                "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse", "sparse"],
            },
            (1, 2, 4, 5),
        ),
        ({"moe_layers": [1, 3, 5], "interleave_moe_layer_step": 2}, (1, 3, 5)),  # Llama 4
    ],
)
def test_layer_types_and_lists(placement, layers):
    assert ModelLayout.from_config(BASE | placement).moe_layers == layers


@pytest.mark.parametrize(
    "placement",
    [
        {"expert_layer_period": 2, "expert_layer_offset": 1},  # Jamba
        {"interleave_moe_layer_step": 2},  # Llama 4
        {"moe_layer_start_index": 3, "moe_layer_end_index": 5, "moe_layer_interval": 1},  # Ernie 4.5
        {"num_dense_layers": 2},  # AFMoE
        {"moe_layers_enum": "3,4,5"},  # Step 3.5
        {"hybrid_override_pattern": "MEMEM*"},  # Nemotron-H
    ],
)
def test_other_ways_of_placing_experts_are_refused_by_name(placement):
    with pytest.raises(LayoutError, match=f"says by '{next(iter(placement))}'.*by hand"):
        ModelLayout.from_config(BASE | placement)
    assert ModelLayout.from_config(BASE | dict.fromkeys(placement)).moe_layers == tuple(range(6))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_layer_freq", 0),
        ("moe_layer_freq", None),
        ("moe_layer_freq", "2"),
        ("first_k_dense_replace", [1]),
        ("decoder_sparse_step", "2"),
        ("decoder_sparse_step", 0),
        ("mlp_only_layers", 3),
        ("mlp_layer_types", ["dense"]),
        ("moe_layers", "1,3"),
    ],
)
def test_placement_of_a_wrong_type_is_named(key, value):
    with pytest.raises(LayoutError, match=f"^{key} is "):
        ModelLayout.from_config(BASE | {key: value})
