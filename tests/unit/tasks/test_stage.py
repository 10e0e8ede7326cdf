"""A stage runs once for equal inputs, and again when its artifact is not there or not whole."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from run_configs import small_config

from miles_core.config.run import RunConfig
from tasks.stage import MissingArtifactError, StageJob, StageResult, StageSpec, in_work_dir, run_stage


class Recorder:
    """A stage that writes its seed, and counts its calls."""

    def __init__(self, fail: Callable[[int], bool] = lambda call: False, resumes: bool = False) -> None:
        self.calls = 0
        self.found_files: list[list[str]] = []
        self._fail = fail
        self.spec = StageSpec(
            "convert",
            "number",
            version=1,
            reads=lambda c: {"seed": c.seed},
            run=in_work_dir(self.work, resumes=resumes),
        )

    def work(self, job: StageJob, out: Path) -> StageResult:
        self.calls += 1
        self.found_files.append(sorted(path.name for path in out.iterdir()))
        (out / f"half-{self.calls}").write_text("half")
        if self._fail(self.calls):
            raise ValueError("as told")
        (out / "seed.txt").write_text(str(job.config.seed))
        return StageResult({"seeds": 1}, outputs={"seed": "seed.txt"}, volatile=("half-*",))

    def job(self, config: RunConfig) -> StageJob:
        return StageJob(self.spec, config, {})


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return small_config(tmp_path / "store")


def test_second_call_takes_the_artifact(config: RunConfig) -> None:
    recorder = Recorder()
    first, second = (run_stage(recorder.job(config)) for _ in range(2))
    assert (first.cached, second.cached, recorder.calls) == (False, True, 1)
    assert first.ref == second.ref
    assert Path(first.ref.uri, "seed.txt").read_text() == "0"


def test_manifest_says_what_was_read_and_made(config: RunConfig) -> None:
    job = Recorder().job(config)
    manifest = job.store.manifest(run_stage(job).ref)
    assert (manifest.stage, manifest.config, manifest.account) == ("convert", {"seed": 0}, {"seeds": 1})
    assert manifest.outputs == {"seed": "seed.txt"}


def test_only_what_the_stage_reads_makes_another_artifact(config: RunConfig) -> None:
    recorder = Recorder()
    run_stage(recorder.job(config))
    assert run_stage(recorder.job(config.model_copy(update={"name": "other"}))).cached
    assert not run_stage(recorder.job(config.model_copy(update={"seed": 1}))).cached


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_text("0" * 9)])
def test_damaged_artifact_is_made_again(config: RunConfig, damage: Callable[[Path], None]) -> None:
    recorder = Recorder()
    first = run_stage(recorder.job(config))
    damage(Path(first.ref.uri, "seed.txt"))
    again = run_stage(recorder.job(config))
    assert (again.cached, again.ref.digest) == (False, first.ref.digest)
    assert run_stage(recorder.job(config)).cached


def test_failure_is_never_cached(config: RunConfig) -> None:
    recorder = Recorder(fail=lambda call: call == 1)
    with pytest.raises(ValueError, match="as told"):
        run_stage(recorder.job(config))
    assert not run_stage(recorder.job(config)).cached
    assert run_stage(recorder.job(config)).cached


@pytest.mark.parametrize(("resumes", "found"), [(False, [[], []]), (True, [[], ["half-1"]])])
def test_what_an_interrupted_attempt_left(config: RunConfig, resumes: bool, found: list[list[str]]) -> None:
    recorder = Recorder(fail=lambda call: call == 1, resumes=resumes)
    with pytest.raises(ValueError, match="as told"):
        run_stage(recorder.job(config))
    run_stage(recorder.job(config))
    assert recorder.found_files == found


def test_reuse_never_runs_although_complete(config: RunConfig) -> None:
    recorder = Recorder()
    first = run_stage(recorder.job(config))
    again = run_stage(recorder.job(config), reuse="never")
    assert (again.cached, again.ref.digest, recorder.calls) == (False, first.ref.digest, 2)


def test_reuse_required_never_runs(config: RunConfig) -> None:
    recorder = Recorder()
    with pytest.raises(MissingArtifactError, match=f"stage convert is not in .*{config.store.uri}.*number/"):
        run_stage(recorder.job(config), reuse="required")
    assert recorder.calls == 0
    run_stage(recorder.job(config))
    assert run_stage(recorder.job(config), reuse="required").cached


def test_artifact_that_is_not_current_is_made_again(config: RunConfig) -> None:
    recorder, current = Recorder(), False
    spec = StageSpec("upload", "number", 1, recorder.spec.reads, recorder.spec.run, is_current=lambda job, ref: current)
    assert [run_stage(StageJob(spec, config, {})).cached for _ in range(2)] == [False, False]
    current = True
    assert run_stage(StageJob(spec, config, {})).cached


def test_two_threads_at_once_do_the_work_once(config: RunConfig) -> None:
    recorder = Recorder()
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda _: run_stage(recorder.job(config)), range(2)))
    assert recorder.calls == 1
    assert sorted(outcome.cached for outcome in outcomes) == [False, True]


SLOW_STAGE = """
import sys, time
from pathlib import Path
from run_configs import small_config
from tasks.stage import StageJob, StageResult, StageSpec, in_work_dir, run_stage

def work(job, out):
    time.sleep(1)
    (out / "x").write_text("x")
    return StageResult({})

spec = StageSpec("convert", "number", 1, lambda config: {}, in_work_dir(work))
print(run_stage(StageJob(spec, small_config(sys.argv[1]), {})).cached)
"""


def test_two_processes_at_once_do_the_work_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW_STAGE, str(tmp_path / "store")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent) for _ in range(2)]
    assert sorted(run.communicate()[0].strip() for run in runs) == ["False", "True"]
