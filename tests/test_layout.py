import json

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
