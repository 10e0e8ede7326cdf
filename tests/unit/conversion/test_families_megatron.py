"""Families against megatron-core: the rules name its parameters, and it computes with them what transformers does."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from gpt_models import gpt_model
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from tiny_models import TINY, saved_config
from transformers.modeling_layers import MtpLayer

from conversion.families import geometry_from_config, rules_for
from conversion.geometry import ModelGeometry
from conversion.random_model import make_random_model
from conversion.safetensors_io import SafetensorsFolder

# MiniMax-M2 (full-width norms) and Gemma (sandwich norms) need more than megatron-core's own layer spec.
BUILDABLE = ["llama", "qwen2-tied", "qwen3", "qwen3-moe", "glm4-moe", "deepseek-v3", "deepseek-v3-no-q-lora"]
SAME_LOGITS = [name for name in BUILDABLE if name != "deepseek-v3"]  # its YaRN is not configured here


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class _Attention(torch.nn.Module):
    """Causal attention over [length, batch, heads, width]; the local spec's own has no separate width of values."""

    def __init__(self, *_, **__):
        super().__init__()

    def forward(self, query, key, value, *_, **__):
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def _gpt_model(g: ModelGeometry, mtp_num_layers: int) -> GPTModel:
    return gpt_model(g, mtp_num_layers, _Attention).eval()


def _tensors(model: GPTModel) -> dict[str, torch.Tensor]:
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")}
    return dict(model.named_parameters()) | biases


@pytest.mark.parametrize("name", BUILDABLE)
def test_names_and_shapes_are_those_of_gpt_model(name):
    geometry = geometry_from_config(saved_config(name))
    layers = geometry.mtp_num_layers
    rules = {rule.megatron: rule.shape for rule in rules_for(geometry, layers)}
    assert rules == {name: tuple(tensor.shape) for name, tensor in _tensors(_gpt_model(geometry, layers)).items()}


@pytest.mark.parametrize("name", SAME_LOGITS)
def test_logits_equal_those_of_transformers(name):
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(TINY[name], attn_implementation="eager").eval()
    geometry = geometry_from_config(saved_config(name))
    ours = _gpt_model(geometry, 0)
    ids = torch.randint(1, geometry.vocab_size, (2, 20))
    with torch.no_grad():
        for parameter in theirs.state_dict().values():
            parameter.normal_(std=0.3)  # norms and biases too, so that a mix-up of two equal shapes shows
        hf = _as_saved(theirs)
        for rule in rules_for(geometry, 0):
            _tensors(ours)[rule.megatron].copy_(rule.to_megatron(hf.__getitem__, hf))
        expected = theirs(ids).logits
        logits = ours(ids, torch.arange(20).expand(2, -1), None)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert expected.std() > 0.1


def test_mtp_layer_equals_that_of_transformers(tmp_path):
    shape = {"num_layers": 2, "num_dense_layers": 1, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
    shape |= {"head_dim": 8, "ffn_hidden_size": 48, "num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 16}
    make_random_model(tmp_path, **shape, num_mtp_layers=1, max_position=32, seed=0)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    geometry = geometry_from_config(config.to_dict())
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    layer = MtpLayer(config, type(theirs.model.layers[1]), type(theirs.model.norm), layer_idx=2).eval()
    ours = _gpt_model(geometry, 1)
    with SafetensorsFolder(tmp_path) as folder, torch.no_grad():
        for rule in rules_for(geometry, 1):
            _tensors(ours)[rule.megatron].copy_(rule.to_megatron(folder.read, folder.names))
        prefix = "model.layers.2."
        own = {n.removeprefix(prefix): folder.read(n) for n in folder.names if n.startswith(prefix)}
    experts = range(geometry.moe.num_experts)
    gate_up = [torch.cat([own.pop(f"mlp.experts.{e}.{half}_proj.weight") for half in ("gate", "up")]) for e in experts]
    own["mlp.experts.gate_up_proj"] = torch.stack(gate_up)
    own["mlp.experts.down_proj"] = torch.stack([own.pop(f"mlp.experts.{e}.down_proj.weight") for e in experts])
    del own["embed_tokens.weight"], own["shared_head.head.weight"]
    own["post_norm.weight"] = own.pop("shared_head.norm.weight")
    outside = ("enorm", "hnorm", "eh_proj", "post_norm")
    layer.load_state_dict({n if n.startswith(outside) else f"mtp_block.{n}": tensor for n, tensor in own.items()})

    embedded, hidden = torch.randn(2, 1, 6, 32)
    position_ids = torch.arange(6)[None]
    mask = torch.full((6, 6), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        rotary = theirs.model.rotary_emb(hidden, position_ids)
        expected = layer(embedded, hidden, rotary, mask, position_ids, None)
        actual = ours.mtp.layers[0]._proj_and_transformer_layer(
            hidden_states=hidden.transpose(0, 1),
            decoder_input=embedded.transpose(0, 1),
            rotary_pos_emb=ours.rotary_pos_emb(6),
        )
    torch.testing.assert_close(actual.transpose(0, 1), expected, rtol=1e-4, atol=1e-5)


def _as_saved(model) -> dict[str, torch.Tensor]:
    """State dict with the fused experts under the names that they have in a file."""
    state = {}
    for name, tensor in model.state_dict().items():
        prefix = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        if not prefix.endswith("experts."):
            state[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            if name.endswith("gate_up_proj"):
                gate, up = weight.chunk(2)
                state |= {f"{prefix}{expert}.gate_proj.weight": gate, f"{prefix}{expert}.up_proj.weight": up}
            else:
                state[f"{prefix}{expert}.down_proj.weight"] = weight
    return state
