"""download: the model that a run starts from, as a Hugging Face folder of known contents.

From the Hub at a pinned commit, from a local folder, or made here with random weights.
"""

import shutil
from pathlib import Path
from typing import Any

from conversion.safetensors_header import CheckpointError, read_headers
from miles_core.config.run import RunConfig
from storage.progress import Progress
from tasks.hub import SCHEME, fetch_snapshot, is_wanted, resolve_commit
from tasks.named_files import model_digests
from tasks.stage import StageJob, StageResult, StageSpec, in_work_dir


def reads(config: RunConfig) -> dict[str, Any]:
    """What names the model's contents: a commit, checksums of a folder's files, or parameters of a random one."""
    model = config.model
    if model.random is not None:
        return {"random": model.random.model_dump(mode="json")}
    assert model.path is not None  # RunConfig allows no third case
    if model.path.startswith(SCHEME):
        repo = model.path.removeprefix(SCHEME)
        return {"repo": repo, "commit": resolve_commit(repo, model.revision)}
    folder = Path(model.path)
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is no folder"
        raise CheckpointError(f"{model.path!r} {what}: model.path must be a Hugging Face folder or {SCHEME}ORG/NAME")
    return {"files": model_digests(folder)}


def download(job: StageJob, out: Path) -> StageResult:
    """Fills `out` with the model's files and checks that all tensors are there, by the headers of the shards."""
    model = job.config.model
    if model.random is not None:
        from conversion.random_model import make_random_model

        account: dict[str, Any] = {"source": "random", **make_random_model(out, **model.random.model_dump())}
    elif "commit" in job.params:
        account = fetch_snapshot(job.params["repo"], job.params["commit"], out, job.progress)
    else:
        assert model.path is not None
        account = _copy_folder(Path(model.path), out, job.progress)
    tensors = read_headers(out)
    account |= {"tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors.values())}
    return StageResult(account)


def _copy_folder(folder: Path, out: Path, progress: Progress) -> dict[str, Any]:
    read_headers(folder)  # before the first byte is copied
    files = sorted(path for path in folder.iterdir() if path.is_file() and is_wanted(path.name))
    done, total = 0, sum(path.stat().st_size for path in files)
    for path in files:
        # Copied, not linked: the folder is the user's, who may write to it again.
        shutil.copyfile(path, out / path.name)
        done += path.stat().st_size
        progress(done, total, f"copy {path.name}")
    left_out = sorted(path.name for path in folder.iterdir() if path not in files)
    return {"source": str(folder.absolute()), "files": len(files), "left_out": left_out}


DOWNLOAD = StageSpec("download", kind="model", version=1, reads=reads, run=in_work_dir(download))
