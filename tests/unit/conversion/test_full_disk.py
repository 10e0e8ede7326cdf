"""A disk of one megabyte: noticed before the work where the size is known, named where not, and left clean."""

import errno
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import read_tensors, write_checkpoint
from tiny_models import saved_config

from conversion.disk import DiskFullError
from conversion.families import geometry_from_config
from conversion.hf_to_torch_dist import hf_to_torch_dist
from conversion.safetensors_io import SafetensorsWriter, copy_side_files
from conversion.torch_dist_to_hf import torch_dist_to_hf
from conversion.torch_dist_writer import TorchDistWriter


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs; only root may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount a small file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_conversions_notice_before_they_write(tmp_path: Path, small_disk: Path) -> None:
    hf = write_checkpoint(tmp_path / "hf", "llama", vocab_size=20_000)
    hf_to_torch_dist(hf, tmp_path / "torch_dist")
    size = sum(tensor.nbytes for tensor in read_tensors(hf).values())
    conversions: list[Callable[[], object]] = [
        lambda: hf_to_torch_dist(hf, small_disk / "out"),
        lambda: torch_dist_to_hf(tmp_path / "torch_dist", hf, small_disk / "out"),
    ]
    for convert in conversions:
        with pytest.raises(DiskFullError, match=r"\d+ bytes are needed and 1048576 are free.*out") as caught:
            convert()
        assert int(caught.value.strerror.split()[0]) >= size
        assert list(small_disk.iterdir()) == []


def test_writers_name_the_file_and_leave_nothing(small_disk: Path) -> None:
    noise = torch.randint(255, (300_000,), dtype=torch.uint8)
    with (
        pytest.raises(DiskFullError, match=r"full.*model-00001.safetensors.partial") as caught,
        SafetensorsWriter(small_disk / "out") as safetensors,
    ):
        for i in range(5):
            safetensors.write(str(i), noise)
    assert caught.value.errno == errno.ENOSPC
    assert list((small_disk / "out").iterdir()) == []

    geometry = geometry_from_config(saved_config("llama"))
    with (
        pytest.raises(DiskFullError, match=r"full while writing 300000 bytes.*__0_0.distcp"),
        TorchDistWriter(small_disk / "release", geometry) as torch_dist,
    ):
        for i in range(5):
            torch_dist.write(f"decoder.layers.{i}.input_layernorm.weight", noise)
    assert [p.name for p in small_disk.iterdir()] == ["out"]


def test_side_files_are_named(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(bytes(2_000_000))
    with pytest.raises(DiskFullError, match=r"full.*tokenizer.json"):
        copy_side_files(tmp_path, small_disk)
