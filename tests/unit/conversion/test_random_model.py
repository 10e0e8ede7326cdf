"""The random model and its tokenizer, as transformers reads them."""

import jinja2
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from conversion.character_tokenizer import VOCABULARY
from conversion.families import UnsupportedModelError, geometry_from_config, rules_for
from conversion.mapping import check_complete
from conversion.random_model import make_random_model
from conversion.safetensors_io import SafetensorsFolder

SHAPE = {
    "num_layers": 3,
    "num_dense_layers": 1,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 12,
    "ffn_hidden_size": 48,
    "num_experts": 4,
    "top_k": 2,
    "moe_ffn_hidden_size": 16,
    "num_mtp_layers": 2,
    "max_position": 64,
    "seed": 3,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, make_random_model(folder, **SHAPE)


def test_transformers_loads_all_but_the_mtp_layers(made):
    folder, _ = made
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model) is transformers.Glm4MoeForCausalLM
    assert model.dtype == torch.float32
    assert not report["missing_keys"] and not report["mismatched_keys"] and not report["error_msgs"]
    assert {name.split(".")[2] for name in report["unexpected_keys"]} == {"3", "4"}
    ids = torch.randint(len(VOCABULARY), (2, 10))
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.shape == (2, 10, len(VOCABULARY))
    assert logits.isfinite().all()


def test_its_tensors_are_those_transformers_would_save(made, tmp_path):
    folder, _ = made
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    with SafetensorsFolder(folder) as ours, SafetensorsFolder(tmp_path) as theirs:
        mtp = {name for name in ours.names if name.startswith(("model.layers.3.", "model.layers.4."))}
        assert set(ours.names) - mtp == set(theirs.names)
        assert all(ours.read(name).equal(theirs.read(name)) for name in theirs.names)
        as_layer_2 = {name.replace("layers.2.", "layers.3.") for name in theirs.names if "layers.2." in name}
        extra = ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.norm", "shared_head.head")
        assert {n for n in mtp if ".layers.3." in n} == as_layer_2 | {f"model.layers.3.{n}.weight" for n in extra}


def test_account_adds_up(made):
    folder, account = made
    config = transformers.AutoConfig.from_pretrained(folder)
    with SafetensorsFolder(folder) as tensors:
        coverage = check_complete(rules_for(geometry_from_config(config.to_dict()), 2), tensors.names)
        assert (coverage.copies, coverage.left_out) == (4, 0)  # embedding and head of two MTP layers
        assert account["tensors"] == len(tensors.names)
        copied = 4 * len(VOCABULARY) * SHAPE["hidden_size"]
        assert account["bytes"] == tensors.total_bytes == 4 * (account["parameters"] + copied)
    assert account["mtp_layers"] == 2


def test_initial_weights(made):
    with SafetensorsFolder(made[0]) as tensors:
        for name in tensors.names:
            tensor = tensors.read(name)
            if name.endswith("norm.weight"):
                assert tensor.eq(1).all(), name
            elif name.endswith("e_score_correction_bias"):
                assert tensor.eq(0).all(), name
            else:
                assert tensor.std() == pytest.approx(0.02, rel=0.25), name
        embedding = tensors.read("model.embed_tokens.weight")
        assert tensors.read("model.layers.3.embed_tokens.weight").equal(embedding)
        assert not tensors.read("lm_head.weight").equal(embedding)


def test_same_fields_give_the_same_bytes(made, tmp_path):
    make_random_model(tmp_path / "same", **SHAPE)
    make_random_model(tmp_path / "other", **SHAPE | {"seed": 4})
    contents = [
        {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        for folder in (made[0], tmp_path / "same", tmp_path / "other")
    ]
    assert contents[0] == contents[1]
    assert [name for name in contents[0] if contents[0][name] != contents[2][name]] == ["model.safetensors"]


def test_impossible_shapes_and_full_folders_are_refused(made, tmp_path):
    with pytest.raises(UnsupportedModelError, match="num_attention_heads 4 is not a multiple"):
        make_random_model(tmp_path, **SHAPE | {"num_kv_heads": 3})
    with pytest.raises(UnsupportedModelError, match="leaves none of 3 layers"):
        make_random_model(tmp_path, **SHAPE | {"num_dense_layers": 3})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileExistsError):
        make_random_model(made[0], **SHAPE)


@pytest.fixture(scope="module")
def tokenizer(made):
    return AutoTokenizer.from_pretrained(made[0])


def test_one_token_a_character(tokenizer):
    text = "".join(token for token in VOCABULARY if len(token) == 1)
    assert len(tokenizer) == len(VOCABULARY) == 64
    assert tokenizer(text)["input_ids"] == list(range(6, 64))
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("a  b<eos>")["input_ids"][-1] == tokenizer.eos_token_id == 1
    assert tokenizer.pad_token_id == 0
    assert tokenizer.model_max_length == 64


@pytest.mark.parametrize("text", ["A", "1 + é", "a\tb", "5 % 2"])
def test_a_character_outside_the_alphabet_raises(tokenizer, text):
    with pytest.raises(Exception, match="Missing \\[UNK\\] token"):
        tokenizer(text)


CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "3+4=?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 3}}}]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "7"},
]


def test_chat_template(tokenizer):
    rendered = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    call = '{"name": "add", "arguments": {"a": 3}}'
    assert rendered == f"<|system|>be brief<|user|>3+4=?<|assistant|>{call}<eos><|tool|>7<|assistant|>7<eos>"
    prompt = tokenizer.apply_chat_template(CONVERSATION[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|system|>be brief<|user|>3+4=?<|assistant|>"


def test_chat_template_marks_what_the_assistant_says(tokenizer):
    encoded = tokenizer.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=True)
    said = [i for i, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(said) == '{"name": "add", "arguments": {"a": 3}}<eos>7<eos>'


def test_chat_template_refuses_an_unknown_role(tokenizer):
    with pytest.raises(jinja2.exceptions.TemplateError, match="unknown role critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "no"}], tokenize=False)
