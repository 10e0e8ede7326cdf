"""config.json to geometry: against transformers' modules, for released models, and refusals."""

import importlib
import math

import pytest
import torch
import transformers
from released_models import RELEASED
from tiny_models import TINY, saved_config

from conversion.families import FAMILIES, UnknownFamilyError, UnsupportedModelError, geometry_from_config, rules_for
from conversion.geometry import RopeGeometry

# What distinguishes the families, by hand from the tiny configs; other fields are compared with transformers below.
EXPECTED = {
    "llama": {"tie_embeddings": False, "qk_norm": "none", "norm_eps": 1e-5, "head_dim": 16, "moe": None},
    "llama-tied-biased": {"tie_embeddings": True, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 24, "sliding_window": 16, "is_sliding_layer": (True, True, True)},
    "qwen2": {"qkv_bias": True, "attention_out_bias": False, "is_sliding_layer": (False, True, True)},
    "qwen2-tied": {"tie_embeddings": True, "sliding_window": None, "is_sliding_layer": ()},
    "qwen3": {"qkv_bias": False, "qk_norm": "head", "head_dim": 24},
    "qwen3-moe": {"qk_norm": "head"},
    "glm4-moe": {"qkv_bias": True, "attention_out_bias": False, "qk_norm": "head", "mtp_num_layers": 1},
    "deepseek-v3": {"head_dim": 20, "mtp_num_layers": 1},
    "minimax-m2": {"qk_norm": "full", "ffn_hidden_size": 96, "mtp_num_layers": 0},
    "gemma2": {"attention_softcap": 50.0, "logit_softcap": 30.0, "qk_norm": "none", "activation": "gelu_tanh"},
    "gemma3": {"attention_softcap": None, "logit_softcap": 20.0, "qk_norm": "head", "local_rope_theta": 10_000.0},
}
EXPECTED_MOE = {
    "qwen3-moe": {"is_moe_layer": (True, False, True), "score": "softmax", "router_bias": False, "norm_topk": True},
    "glm4-moe": {"is_moe_layer": (False, True, True), "score": "sigmoid", "router_bias": True, "num_groups": 3},
    "deepseek-v3": {"top_k": 4, "topk_groups": 2, "routed_scaling": 1.5, "shared_ffn_hidden_size": 48},
    "minimax-m2": {"is_moe_layer": (True,) * 3, "ffn_hidden_size": 96, "routed_scaling": 1.0, "norm_topk": True},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_fields(name):
    geometry = geometry_from_config(saved_config(name))
    assert {field: getattr(geometry, field) for field in EXPECTED[name]} == EXPECTED[name]
    for field, value in EXPECTED_MOE.get(name, {}).items():
        assert getattr(geometry.moe, field) == value, field


@pytest.mark.parametrize("name", TINY)
def test_attention_norm_and_embedding_are_those_of_transformers(name):
    geometry = geometry_from_config(saved_config(name))
    model = transformers.AutoModelForCausalLM.from_config(TINY[name])
    for layer, block in enumerate(model.model.layers):
        assert block.self_attn.scaling == pytest.approx(geometry.attention_scale or geometry.head_dim**-0.5, rel=1e-12)
        sliding = geometry.is_sliding_layer[layer] if geometry.is_sliding_layer else False
        window = getattr(block.self_attn, "sliding_window", getattr(model.config, "sliding_window", None))
        assert (geometry.sliding_window if sliding else None) == window
    hidden, norm = torch.randn(64) * 1e-3, model.model.layers[0].input_layernorm  # small, so that eps counts
    norm.weight.data.normal_()
    rms = (hidden.square().mean() + geometry.norm_eps).sqrt()
    torch.testing.assert_close(norm(hidden), hidden / rms * (norm.weight + int(geometry.norm_plus_one)))
    ids = torch.arange(101)[None]
    scaled = model.model.embed_tokens.weight * geometry.embedding_scale
    torch.testing.assert_close(model.model.embed_tokens(ids)[0], scaled, rtol=1e-6, atol=0)


def _rotate(x: torch.Tensor, rope: RopeGeometry) -> torch.Tensor:
    """x [length, head_dim] with each pair of dims turned by position * theta^(-2 i / rotary_dim)."""
    half = rope.rotary_dim // 2
    angles = torch.arange(len(x))[:, None] * rope.theta ** -(torch.arange(half) * 2 / rope.rotary_dim)
    first = torch.arange(half) * 2 if rope.interleaved else torch.arange(half)
    second = first + (1 if rope.interleaved else half)
    turned = x.clone()
    turned[:, first] = x[:, first] * angles.cos() - x[:, second] * angles.sin()
    turned[:, second] = x[:, second] * angles.cos() + x[:, first] * angles.sin()
    return turned


@pytest.mark.parametrize("name", [name for name in TINY if name != "deepseek-v3"])
def test_rope_turns_as_in_transformers(name):
    config, geometry = TINY[name], geometry_from_config(saved_config(name))
    modeling = importlib.import_module(transformers.AutoModelForCausalLM._model_mapping[type(config)].__module__)
    model = transformers.AutoModelForCausalLM.from_config(config)
    width = geometry.mla.qk_rope_head_dim if geometry.mla else geometry.head_dim
    query, key = torch.randn(2, 9, width, dtype=torch.float64)
    if name == "gemma3":
        cos_sin = model.model.rotary_emb(query, torch.arange(9)[None], "full_attention")
    else:
        cos_sin = model.model.rotary_emb(query, torch.arange(9)[None])
    apply = modeling.apply_rotary_pos_emb_interleave if geometry.rope.interleaved else modeling.apply_rotary_pos_emb
    their_query, their_key = apply(query[None, None], key[None, None], *cos_sin)
    # Scores, because transformers puts the turned pairs of interleaved dims elsewhere.
    expected = (their_query @ their_key.mT)[0, 0]
    torch.testing.assert_close(
        _rotate(query, geometry.rope) @ _rotate(key, geometry.rope).T, expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", RELEASED)
def test_released_model(name):
    old_style, parameters = RELEASED[name]
    geometry = geometry_from_config(old_style)
    assert sum(math.prod(rule.shape) for rule in rules_for(geometry, 0)) == parameters
    new_style = transformers.AutoConfig.for_model(**old_style).to_diff_dict()
    assert "rope_parameters" in new_style
    assert geometry_from_config(new_style | {"architectures": old_style["architectures"]}) == geometry


def test_rope_of_released_models():
    ropes = {name: geometry_from_config(config).rope for name, (config, _) in RELEASED.items()}
    assert ropes["Qwen3-4B"] == RopeGeometry(theta=1e6, rotary_dim=128)
    assert ropes["GLM-4.5-Air"] == RopeGeometry(theta=1e6, rotary_dim=64)
    assert ropes["MiniMax-M2"] == RopeGeometry(theta=5e6, rotary_dim=64)
    assert ropes["DeepSeek-V3"].interleaved
    assert ropes["DeepSeek-V3"].rotary_dim == 64
    assert ropes["DeepSeek-V3"].scaling["rope_type"] == "yarn"
    assert ropes["Llama-3.2-1B"].scaling == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_deepseek_yarn_scale():
    # 1.3688879... = 0.1 ln 40 + 1, squared, over sqrt(192)
    geometry = geometry_from_config(RELEASED["DeepSeek-V3"][0])
    assert geometry.attention_scale == pytest.approx(1.3688879454**2 / 13.8564064606, rel=1e-9)


def test_mtp_layers_are_like_the_last_layer():
    geometry = geometry_from_config(saved_config("glm4-moe"))
    assert [geometry.is_moe(layer) for layer in range(5)] == [False, True, True, True, True]
    assert not geometry_from_config(saved_config("llama")).is_moe(0)


def test_architecture_may_be_given_by_model_type():
    config = saved_config("llama") | {"architectures": None}
    assert geometry_from_config(config).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]}, "LlamaForCausalLM and Qwen2ForCausalLM"),
        ({"architectures": [], "model_type": "gpt2"}, "model_type 'gpt2' without architectures"),
    ],
)
def test_unknown_family_names_what_was_found_and_what_is_known(change, found):
    with pytest.raises(UnknownFamilyError) as error:
        geometry_from_config(saved_config("llama") | change)
    assert f"no model family for {found}" in str(error.value)
    assert all(architecture in str(error.value) for architecture in FAMILIES)
    assert "model.path" in str(error.value)


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1, supported: 0.0"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', supported: 'silu'"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0, it must be a positive whole number"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ("llama", {"attention_sinks": 4}, "attention_sinks = 4 is not known to this family"),
        ("llama", {"index_topk": 2048}, "index_topk = 2048 is not known to this family"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear', it must be an object"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic', supported: 'default'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_type 'linear' needs a number as its factor, found None"),
        ("llama", {"rope_scaling": {"rope_type": "default", "mrope_section": [2]}}, "mrope_section = [2] is not known"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5, supported: 1.0"),
        ("glm4-moe", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5"),
        ("glm4-moe", {"rope_parameters": {"partial_rotary_factor": 0.3}}, "7 dims of a head are rotated"),
        ("glm4-moe", {"n_group": 5}, "n_routed_experts 12 is not a multiple of n_group 5"),
        ("glm4-moe", {"topk_group": 1}, "num_experts_per_tok 4 must be twice topk_group 1"),
        ("glm4-moe", {"num_experts_per_tok": 13}, "num_experts_per_tok 13 is larger than n_routed_experts 12"),
        ("glm4-moe", {"first_k_dense_replace": 3}, "leaves none of 3 layers with routed experts"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave is False, supported: True"),
        ("deepseek-v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, supported: 1e-06"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method is 'greedy', supported: 'noaux_tc'"),
        ("minimax-m2", {"attn_type_list": [0, 1, 1]}, "attn_type_list is [0, 1, 1]"),
        ("minimax-m2", {"shared_intermediate_size": 96}, "shared_intermediate_size is 96, supported: 0"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}, "layer_types holds 'linear_attention'"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2}}}, "is scaled"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True, supported: False"),
    ],
)
def test_what_cannot_be_represented_is_refused(name, change, fault):
    with pytest.raises(UnsupportedModelError) as error:
        geometry_from_config(saved_config(name) | change)
    assert fault in str(error.value)
    assert "model.path" in str(error.value)


def test_all_faults_are_reported_at_once():
    faults = {"attention_dropout": 0.1, "hidden_act": "relu", "use_alibi": True}
    with pytest.raises(UnsupportedModelError) as error:
        geometry_from_config(saved_config("llama") | faults)
    assert all(key in str(error.value) for key in faults)
