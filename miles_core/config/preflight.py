"""Faults of the outside world, all at once, before Ray or torch start: files, model, store, packages, machine."""

import glob
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from miles_core.config.preflight_model import model_faults
from miles_core.config.run import RunConfig
from miles_core.rollout.files import rollout_file


@dataclass(frozen=True)
class PreflightReport:
    """`faults` keep a run from starting, `warnings` do not."""

    faults: list[str]
    warnings: list[str]


def preflight(config: RunConfig) -> PreflightReport:
    """Looks at everything that the configuration points to. Changes nothing but a probe object in the stores."""
    faults = [*model_faults(config), *_data_faults(config), *_store_faults(config), *_debug_faults(config)]
    if config.cluster.address is not None:  # packages and processors matter where the loop runs
        return PreflightReport(faults, [])
    faults += [*_missing_packages(config), *_machine_faults(config)]
    return PreflightReport(faults, _machine_warnings(config))


def _data_faults(config: RunConfig) -> list[str]:
    from miles_core.data.rows import DataError, scan_conversations, scan_prompts
    from miles_core.data.tasks import build_task
    from miles_core.rewards.function import find_module, split_path

    data, faults = config.data, []
    if data.task is not None and not _missing_packages(config):
        try:
            build_task(data.task)
        except DataError as error:
            faults += error.faults
    for path in (data.prompts, data.eval_prompts):
        if path is not None:
            faults += scan_prompts(Path(path), data)[0]
    if data.conversations is not None:
        faults += scan_conversations(Path(data.conversations))[0]
    faults += [
        f"distillation.teachers: {folder} is no Hugging Face folder, it has no config.json"
        for folder in config.distillation.teachers
        if not (Path(folder) / "config.json").is_file()
    ]
    if config.reward.function is not None:
        try:
            module, _ = split_path(config.reward.function)
        except ValueError as error:
            faults.append(str(error))
        else:
            if not find_module(module):
                faults.append(f"reward.function {config.reward.function!r}: there is no module {module}")
    return faults


def _debug_faults(config: RunConfig) -> list[str]:
    folder, wanted = config.debug.load_rollouts, config.rollout.num_rollout
    if folder is None:
        return []
    missing = [i for i in range(wanted) if not rollout_file(Path(folder), i).is_file()]
    if not missing:
        return []
    return [
        f"debug.load_rollouts {folder} has {wanted - len(missing)} of the {wanted} rollouts of rollout.num_rollout, "
        f"{rollout_file(Path(folder), missing[0]).name} is missing: lower rollout.num_rollout or save more"
    ]


def _store_faults(config: RunConfig) -> list[str]:
    from storage.filesystem import check_writable
    from storage.retry import StoreError

    faults = []
    targets = [("store", config.store.uri, config.store.endpoint_url)]
    if config.upload.uri is not None:
        targets.append(("upload", config.upload.uri, config.upload.endpoint_url or config.store.endpoint_url))
    for section, uri, endpoint_url in targets:
        try:
            check_writable(uri, endpoint_url, section=section)
        except StoreError as error:
            faults.append(str(error))
    return faults


def _missing_packages(config: RunConfig) -> list[str]:
    """A fault for each package that a choice needs, and that is not installed."""
    task = config.data.task.name if config.data.task is not None else ""
    needed = {
        "sglang": ("rollout.engine=sglang", "sglang", config.rollout.engine == "sglang"),
        "reasoning_gym": (f"data.task.name={task}", "train", task.startswith("reasoning_gym/")),
        "math_verify": (f"reward.type={config.reward.type}", "train", config.reward.type in ("math", "boxed_math")),
    }
    return [
        f"{option} needs the package {package}: pip install 'miles-on-prefect[{extra}]'"
        for package, (option, extra, chosen) in needed.items()
        if chosen and find_spec(package) is None
    ]


def _machine_faults(config: RunConfig) -> list[str]:
    if config.trainer.exact and _gpus():
        return [f"trainer.exact=true is for CPUs, and this machine has {_gpus()} GPUs: set trainer.exact=false"]
    return []


def _gpus() -> int:
    return len(glob.glob("/dev/nvidia[0-9]*"))


def _machine_warnings(config: RunConfig) -> list[str]:
    warnings = []
    gpus = _gpus()
    ranks, cpus = config.trainer.num_ranks, config.cluster.num_cpus or os.cpu_count() or 1
    if gpus and ranks > gpus:
        warnings.append(f"trainer.num_ranks {ranks} on {gpus} GPUs: each rank wants one of its own")
    if not gpus and ranks > cpus:
        warnings.append(f"trainer.num_ranks {ranks} on {cpus} CPUs: ranks take turns, which is slow")
    if not gpus and config.trainer.precision == "bf16":
        warnings.append("trainer.precision=bf16 without a GPU: most CPUs compute bf16 slowly, fp32 is faster there")
    if gpus and config.trainer.precision == "fp32":
        warnings.append("trainer.precision=fp32 on a GPU: bf16 takes half the memory and is several times as fast")
    return warnings
