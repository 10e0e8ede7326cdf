"""A character-level tokenizer as Hugging Face files: one token a character, nothing to train, nothing to download.

A character outside the alphabet raises in `encode` ("Missing [UNK] token from the vocabulary"): there is no unknown
token that could hide it.
"""

import json
from pathlib import Path

PAD, EOS = "<pad>", "<eos>"
_ROLES = ("user", "assistant", "system", "tool")
_SPECIAL = (PAD, EOS, *(f"<|{role}|>" for role in _ROLES))
_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz\n +-*/=<>()[]{}.,:?_\"'"
VOCABULARY = (*_SPECIAL, *_CHARACTERS)  # 64 tokens; the index is the token id
PAD_ID, EOS_ID = VOCABULARY.index(PAD), VOCABULARY.index(EOS)

# Each message opens with its role; what the assistant says, tool calls included, ends with <eos>. The generation block
# marks that part for `apply_chat_template(return_assistant_tokens_mask=True)`.
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('unknown role ' + message.role) -}}
{%- endif -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{{- (call.function or call) | tojson -}}
{%- endfor -%}
{{- '<eos>' -}}
{%- endgeneration -%}
{%- else -%}
{{- message.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def write_character_tokenizer(out: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; `max_length` is in tokens."""
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": VOCABULARY.index(token), "content": token, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for token in _SPECIAL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},  # without it, tokens are joined by spaces
        "model": {
            "type": "WordLevel",
            "vocab": {token: index for index, token in enumerate(VOCABULARY)},
            "unk_token": "<unk>",  # the format asks for a name; not being in the vocabulary, it is never produced
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, indent=2) + "\n")
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
