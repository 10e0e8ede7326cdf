"""A whole checkpoint folder in a rollout format, tensor by tensor."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from conversion.finite import check_finite
from conversion.quantization.codec import Codec, codec_for, codec_from_config
from conversion.quantization.dequantized import DequantizedFolder, open_checkpoint
from conversion.quantization.policy import kept_modules, quantized_names
from conversion.safetensors_header import read_headers, read_json
from conversion.safetensors_io import SafetensorsFolder, SafetensorsWriter, copy_side_files
from conversion.streaming import Progress, no_progress, run_ahead


def quantize_folder(
    src: Path, dst: Path, format: str, group_size: int, progress: Progress = no_progress
) -> dict[str, Any]:
    """Writes the checkpoint `src` to the new folder `dst` in a rollout format.

    With `none` the files are the same, hard-linked where possible. A source that is FP8 itself is decoded first (and
    with `none`, stays decoded), since the trainer's weights, which later take the place of these, are made that way.

    Args:
        format, group_size: quantize.format and quantize.group_size.

    Returns:
        The account: tensors read, quantized and kept, bytes before (in high precision) and after, and their ratio.

    Raises:
        CheckpointError: `src` is incomplete or damaged.
        QuantizationError: a tensor can't be quantized; names it.
        ConversionError: a tensor that stays holds NaN or infinity; names it.
        FileExistsError: `dst` holds weights.
    """
    codec = codec_for(format, group_size)
    with open_checkpoint(src) as source:
        if codec is None and isinstance(source, SafetensorsFolder):
            return _link(source, dst, progress)
        with SafetensorsWriter(dst) as writer:
            copy_side_files(src, dst, leave=["config.json"])
            config = {k: v for k, v in read_json(src / "config.json").items() if k != "quantization_config"}
            quantized: frozenset[str] = frozenset()
            if codec is not None:
                shapes = {name: source.spec(name).shape for name in source.names}
                quantized = quantized_names(shapes, codec.spec.format)
                config["quantization_config"] = codec.hf_config(kept_modules(shapes, codec.spec.format))
            (dst / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            done = 0
            for name, stored in run_ahead(_jobs(source, codec, quantized)):
                for part, tensor in stored:
                    writer.write(part, tensor)
                done += source.spec(name).nbytes
                progress(done, source.total_bytes, name)
        return _account(format, len(source.names), len(quantized), source.total_bytes, writer.total_size)


def quantized_in_folder(folder: Path) -> frozenset[str]:
    """Names of the weights that a checkpoint folder holds quantized; none of a folder in high precision."""
    codec = codec_from_config(read_json(Path(folder) / "config.json").get("quantization_config"))
    return frozenset() if codec is None else codec.quantized_in(read_headers(Path(folder)))


_Stored = tuple[str, list[tuple[str, torch.Tensor]]]


def _jobs(
    source: SafetensorsFolder | DequantizedFolder, codec: Codec | None, quantized: frozenset[str]
) -> Iterator[tuple[int, Callable[[], _Stored]]]:
    def make(name: str) -> _Stored:
        tensor = source.read(name)
        if codec is None or name not in quantized:
            return name, [(name, check_finite(name, tensor))]
        fused = codec.shares_scale_with(name)
        return name, codec.encode(name, tensor, None if fused is None else source.read(fused))

    for name in source.names:
        yield source.spec(name).nbytes, partial(make, name)


def _link(source: SafetensorsFolder, dst: Path, progress: Progress) -> dict[str, Any]:
    if there := sorted(dst.glob("model*.safetensors*")):
        raise FileExistsError(f"{dst} already holds weights ({there[0].name}); give an empty folder")
    copy_side_files(source.folder, dst)
    index = sorted(path.name for path in source.folder.glob("model*.safetensors.index.json"))
    shards = sorted({source.spec(name).file for name in source.names})
    files = [source.folder / name for name in [*shards, *index]]  # what makes the folder loadable comes last
    done, total = 0, sum(file.stat().st_size for file in files)
    for file in files:
        _link_file(file, dst / file.name)
        done += file.stat().st_size
        progress(done, total, file.name)
    return _account("none", len(source.names), 0, source.total_bytes, source.total_bytes)


def _link_file(src: Path, dst: Path) -> None:
    try:
        os.link(src.resolve(), dst)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(src, dst)


def _account(format: str, tensors: int, quantized: int, before: int, after: int) -> dict[str, Any]:
    return {
        "format": format,
        "tensors": tensors,
        "quantized": quantized,
        "kept": tensors - quantized,
        "bytes_before": before,
        "bytes_after": after,
        "ratio": round(before / after, 3),
    }
