"""Tokenizers of the tests, written as Hugging Face folders."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS, END_OF_TURN, PAD = "<s>", "</s>", "<|end|>", "<pad>"
TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_bpe(out: Path, template: str | None, *, adds_bos: bool, lists_end_of_turn: bool = True) -> Path:
    """Byte-level BPE with one merge; bytes are the vocabulary, so nothing can be lost."""
    out.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "Ġh"])}, merges=[("Ġ", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = [BOS, EOS, END_OF_TURN, PAD, *(f"<|{role}|>" for role in ("system", "user", "assistant", "tool"))]
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
    backend.save(str(out / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    (out / "tokenizer_config.json").write_text(json.dumps(config | ({"chat_template": template} if template else {})))
    eos = backend.token_to_id(EOS)
    ends = [eos, backend.token_to_id(END_OF_TURN)] if lists_end_of_turn else eos
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return out


def write_lossy(out: Path) -> Path:
    """A few letters, no space, and no unknown token: BPE leaves out in silence what it does not know."""
    out.mkdir(parents=True, exist_ok=True)
    backend = Tokenizer(models.BPE(vocab={EOS: 0, "a": 1, "b": 2}, merges=[]))
    backend.add_special_tokens([AddedToken(EOS, special=True)])
    backend.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS})
    )
    return out
