"""What can be known of the model before a run: from its configuration and headers, without torch."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conversion.families import UnknownFamilyError, UnsupportedModelError, geometry_from_config, rules_for
from conversion.geometry import ModelGeometry
from conversion.quantization.policy import preflight_quantize
from conversion.random_model import RandomModel, random_config
from conversion.safetensors_header import CheckpointError, read_headers, read_json
from miles_core.config.preflight_layout import layout_faults
from miles_core.config.run import RunConfig

HUB_SCHEME = "hf://"
_HUB_PATH = re.compile(r"hf://[\w.-]+/[\w.-]+")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class _Model:
    """A model as far as it is known."""

    config: Mapping[str, Any]  # config.json
    geometry: ModelGeometry
    shapes: Mapping[str, tuple[int, ...]] | None = None  # of its tensors, by name
    dtypes: frozenset[str] = frozenset()  # of its tensors


def model_faults(config: RunConfig) -> list[str]:
    """Why the model can not be trained, converted or quantized as configured."""
    faults: list[str] = []
    try:
        model = _look(config, faults)
    except (CheckpointError, UnknownFamilyError, UnsupportedModelError) as error:
        return [*faults, f"model.path {config.model.path}: {error}"]
    if model is None:
        return faults
    architecture = model.geometry.architecture
    return [
        *faults,
        *_mtp_faults(config, model),
        *_length_faults(config, model),
        *_quantize_faults(config, model),
        *(f"{architecture}: {fault}" for fault in layout_faults(model.geometry, config.trainer)),
        *_exact_faults(config, model),
    ]


def _look(config: RunConfig, faults: list[str]) -> _Model | None:
    """The model, or None for one that is not on this machine yet: then the download checks it."""
    if config.model.random is not None:
        described = random_config(RandomModel(**config.model.random.model_dump()))
        geometry = geometry_from_config(described)
        rules = rules_for(geometry, geometry.mtp_num_layers)
        return _Model(described, geometry, {name: shape for rule in rules for name, shape in rule.hf_shapes().items()})
    path = config.model.path or ""
    if path.startswith(HUB_SCHEME):
        return _look_into_hub_cache(config, faults)
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"no such folder (a model of the Hugging Face Hub is written {HUB_SCHEME}ORGANISATION/NAME)"
        )
    faults += _tokenizer_faults(config, folder)
    described = read_json(folder / "config.json")
    headers = read_headers(folder)
    shapes = {name: spec.shape for name, spec in headers.items()}
    dtypes = frozenset(spec.dtype for spec in headers.values())
    return _Model(described, geometry_from_config(described), shapes, dtypes)


def _look_into_hub_cache(config: RunConfig, faults: list[str]) -> _Model | None:
    from huggingface_hub import constants, try_to_load_from_cache

    path = config.model.path or ""
    if not _HUB_PATH.fullmatch(path):
        faults.append(f"model.path {path!r} must be written {HUB_SCHEME}ORGANISATION/NAME")
        return None
    cached = try_to_load_from_cache(path.removeprefix(HUB_SCHEME), "config.json", revision=config.model.revision)
    if isinstance(cached, str):
        described = read_json(Path(cached))
        return _Model(described, geometry_from_config(described))
    if constants.HF_HUB_OFFLINE:
        faults.append(f"model.path {path} is not in the local cache, and HF_HUB_OFFLINE forbids to fetch it")
    return None


def _tokenizer_faults(config: RunConfig, folder: Path) -> list[str]:
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return [f"model.path {folder} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}"]
    settings = folder / "tokenizer_config.json"
    has_template = (folder / "chat_template.jinja").exists() or (
        settings.exists() and bool(json.loads(settings.read_text()).get("chat_template"))
    )
    if config.data.apply_chat_template and not has_template:
        return [f"data.apply_chat_template=true, but the tokenizer in model.path {folder} has no chat template"]
    return []


def _mtp_faults(config: RunConfig, model: _Model) -> list[str]:
    wanted, there = config.model.mtp_num_layers, model.geometry.mtp_num_layers
    if wanted is not None and wanted > there:
        return [f"model.mtp_num_layers {wanted}, but the model has {there} MTP layer{'' if there == 1 else 's'}"]
    scale = config.trainer.mtp_loss_scale
    if scale and not (there if wanted is None else wanted):
        what = "model.mtp_num_layers 0 leaves none of them" if there else f"{model.geometry.architecture} has none"
        return [f"trainer.mtp_loss_scale {scale} trains MTP layers, but {what}: set trainer.mtp_loss_scale=0"]
    return []


def _length_faults(config: RunConfig, model: _Model) -> list[str]:
    prompt, new = config.data.max_prompt_length, config.rollout.sampling.max_new_tokens
    limit = model.geometry.max_position
    if prompt + new <= limit:
        return []
    return [
        f"data.max_prompt_length {prompt} + rollout.sampling.max_new_tokens {new} = {prompt + new} tokens, but the "
        f"model takes {limit}: lower one of them"
    ]


def _quantize_faults(config: RunConfig, model: _Model) -> list[str]:
    if model.shapes is None:
        return []
    quantize, tensor = config.quantize, config.trainer.parallel.tensor
    faults = preflight_quantize(model.config, model.shapes, quantize.format, quantize.group_size)
    if faults or not config.trainer.qat or quantize.format != "int4_linear" or tensor == 1:
        return faults
    # Tensor-parallel ranks share the input of these two: a group must lie on one rank.
    split = {n: s[-1] for n, s in model.shapes.items() if n.endswith(("o_proj.weight", "down_proj.weight"))}
    cut = [f"{n} of width {w}" for n, w in split.items() if ".experts." not in n and w % (quantize.group_size * tensor)]
    if not cut:
        return []
    return [
        f"trainer.qat=true with trainer.parallel.tensor {tensor} cuts groups of {quantize.group_size} in {cut[0]}: "
        "lower quantize.group_size or trainer.parallel.tensor"
    ]


def _exact_faults(config: RunConfig, model: _Model) -> list[str]:
    if not config.trainer.exact:
        return []
    faults = []
    if model.geometry.mla is not None:
        faults.append(
            f"trainer.exact=true with the latent attention of {model.geometry.architecture}: the engine multiplies its "
            "matrices in another order than the trainer; set trainer.exact=false"
        )
    narrow = sorted(model.dtypes - {"float32"})
    if config.trainer.precision == "fp32" and narrow:
        faults.append(
            f"trainer.exact=true with trainer.precision=fp32, but model.path {config.model.path} holds "
            f"{', '.join(narrow)}, to which weights are rounded on their way to the engine; set trainer.precision=bf16"
        )
    return faults
