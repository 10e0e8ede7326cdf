"""Families against transformers: the names and shapes of what it saves, and exact round trips."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import TINY

from conversion.families import FAMILIES, geometry_from_config, left_out_names, rules_for
from conversion.mapping import ConversionError, Coverage, check_complete


@pytest.fixture(scope="module", params=TINY)
def saved(request, tmp_path_factory):
    """config.json and tensors of a tiny model as transformers saves it, every tensor random."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(TINY[request.param])
    for tensor in model.state_dict().values():
        tensor.normal_()
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def test_every_family_is_tested():
    assert {type(config) for config in TINY.values()} == {
        transformers.AutoConfig.for_model(family.model_type).__class__ for family in FAMILIES.values()
    }


def test_names_and_shapes_are_those_transformers_saves(saved):
    config, tensors = saved
    rules = rules_for(geometry_from_config(config), mtp_num_layers=0)
    assert check_complete(rules, tensors) == Coverage(required=len(tensors), copies=0, left_out=0)
    shapes = {name: shape for rule in rules for name, shape in rule.hf_shapes().items() if name in tensors}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_round_trip_is_bit_equal(saved):
    config, tensors = saved
    back = {}
    for rule in rules_for(geometry_from_config(config), mtp_num_layers=0):
        megatron = rule.to_megatron(tensors.__getitem__, tensors)
        assert tuple(megatron.shape) == rule.shape
        back |= rule.to_hf(megatron, present=tensors)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].equal(tensor), name
        assert back[name].is_contiguous(), name


def _with_mtp(name="glm4-moe", layers=2):
    config = TINY[name].to_dict() | {"num_nextn_predict_layers": layers}
    return geometry_from_config(config | {"architectures": [f"{type(TINY[name]).__name__[:-6]}ForCausalLM"]})


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3"])
def test_mtp_layers_follow_the_decoder_layers(name):
    geometry = _with_mtp(name)
    with_mtp = {hf for rule in rules_for(geometry, 2) for hf in rule.hf}
    last = {hf for hf in with_mtp if hf.startswith("model.layers.2.")}
    for layer in (3, 4):
        prefix = f"model.layers.{layer}."
        own = {f"{prefix}{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
        as_last = {hf.replace("model.layers.2.", prefix) for hf in last}
        assert {hf for hf in with_mtp if hf.startswith(prefix)} == own | as_last
    assert any(hf.endswith("experts.11.down_proj.weight") for hf in last)


@pytest.mark.parametrize(("kept", "left_out_layers"), [(0, {3, 4}), (1, {4}), (2, set())])
def test_what_is_left_out_is_named_with_its_copies(kept, left_out_layers):
    geometry = _with_mtp()
    everything = [name for rule in rules_for(geometry, 2) for name in rule.hf_shapes()]
    left_out = left_out_names(geometry, kept)
    assert left_out == {n for n in everything if any(n.startswith(f"model.layers.{i}.") for i in left_out_layers)}
    coverage = check_complete(rules_for(geometry, kept), everything, left_out)
    assert (coverage.copies, coverage.left_out) == (2 * kept, len(left_out))
    assert coverage.required + coverage.copies + coverage.left_out == len(everything)


def test_embedding_and_head_copies_must_be_equal():
    rules = {rule.megatron: rule for rule in rules_for(_with_mtp(layers=1), 1)}
    embedding, head = rules["embedding.word_embeddings.weight"], rules["output_layer.weight"]
    assert embedding.optional_hf == ("model.layers.3.embed_tokens.weight",)
    assert head.optional_hf == ("model.layers.3.shared_head.head.weight",)

    shared = torch.randn(101, 64)
    tensors = {"model.embed_tokens.weight": shared, "model.layers.3.embed_tokens.weight": shared.clone()}
    assert embedding.to_megatron(tensors.__getitem__, tensors).equal(shared)
    assert embedding.to_hf(shared).keys() == tensors.keys()
    assert embedding.to_hf(shared, present={"model.embed_tokens.weight"}).keys() == {"model.embed_tokens.weight"}

    tensors["model.layers.3.embed_tokens.weight"][100, 63] += 1
    with pytest.raises(ConversionError, match=r"model\.layers\.3\.embed_tokens\.weight must be a copy of"):
        embedding.to_megatron(tensors.__getitem__, tensors)


def test_tied_head_may_be_stored_as_a_copy():
    geometry = geometry_from_config(TINY["qwen2-tied"].to_dict() | {"architectures": ["Qwen2ForCausalLM"]})
    rules = rules_for(geometry, 0)
    names = [name for rule in rules for name in rule.hf]
    assert "lm_head.weight" not in names
    assert check_complete(rules, [*names, "lm_head.weight"]).copies == 1


@pytest.mark.parametrize("layers", [-1, 3])
def test_more_mtp_layers_than_the_config_has_are_refused(layers):
    with pytest.raises(ValueError, match=f"model.mtp_num_layers is {layers}, it must be between 0 and 2"):
        rules_for(_with_mtp(), layers)


def test_check_complete_names_every_tensor_concerned():
    rules = rules_for(_with_mtp(layers=0), 0)
    names = {name for rule in rules for name in rule.hf}
    missing = "model.layers.1.mlp.experts.5.down_proj.weight"
    found = [*(names - {missing}), "model.layers.1.mlp.experts.12.up_proj.weight", "model.norm.weight"]
    with pytest.raises(ConversionError) as error:
        check_complete(rules, found)
    assert str(error.value).split("; ") == [
        "1 tensors in the checkpoint, but no rule uses them: model.layers.1.mlp.experts.12.up_proj.weight",
        f"1 tensors missing from the checkpoint: {missing}",
        "1 tensors stored more than once: model.norm.weight",
    ]
    with pytest.raises(ConversionError, match=r"2 tensors used by more than one rule: .*2 tensors made by more than"):
        check_complete([*rules, *rules[:2]], names)


def test_a_wrong_shape_names_tensor_and_both_shapes():
    geometry = geometry_from_config(TINY["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
    rule = next(rule for rule in rules_for(geometry, 0) if rule.megatron.endswith("layers.0.mlp.linear_fc1.weight"))
    gate, up = rule.hf
    with pytest.raises(ConversionError, match=r"layers\.0\.mlp\.up_proj\.weight has shape \[95, 64\].*\[96, 64\]"):
        rule.to_megatron({gate: torch.zeros(96, 64), up: torch.zeros(95, 64)}.__getitem__, ())
    with pytest.raises(ConversionError, match=r"linear_fc1\.weight has shape \[190, 64\].*\[192, 64\]"):
        rule.to_hf(torch.zeros(190, 64))


def test_families_import_no_torch():
    code = (
        "import sys; from conversion.families import geometry_from_config, rules_for;"
        "config = {'architectures': ['LlamaForCausalLM'], 'vocab_size': 8, 'hidden_size': 4, 'intermediate_size': 4,"
        "'num_hidden_layers': 1, 'num_attention_heads': 1, 'max_position_embeddings': 8};"
        "rules_for(geometry_from_config(config), 0); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
