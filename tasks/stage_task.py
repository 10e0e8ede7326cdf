"""A step as a Prefect task: retries, states, a live reward curve, cancellation.

Prefect's own result cache is off. It would be a second record of what is done beside the store's manifests, and one
that still says "done" when an artifact has been deleted; its file locks also outlive a killed process. A step whose
artifact is in the store ends in the state `Cached` all the same.
"""

from contextlib import AbstractContextManager, nullcontext

from prefect import Task, get_client, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, StateType
from prefect.concurrency.sync import concurrency
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed
from prefect.tasks import exponential_backoff

from miles_core.config.run import RunConfig
from storage.manifest import ArtifactRef
from tasks.artifacts import LiveTraining
from tasks.pipeline import PIPELINE, Step
from tasks.progress import stage_progress
from tasks.retries import retry_condition
from tasks.stage import Reuse, StageJob, StageOutcome, run_stage

TRAINING_LIMIT = "miles-training"
"""Name of the global concurrency limit that training takes a slot of, where the server has it."""
_LEASE_SECONDS = 60.0  # after which the slot of a killed run is free again


@task(
    retries=2,
    retry_delay_seconds=exponential_backoff(1),
    retry_jitter_factor=0.2,
    retry_condition_fn=retry_condition,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def run_step(name: str, config: RunConfig, inputs: dict[str, ArtifactRef], reuse: Reuse) -> State[StageOutcome]:
    """Runs the step `name` of the pipeline, or finds its artifact."""
    spec = next(step.spec for step in PIPELINE if step.name == name)
    with stage_progress(name) as progress:
        job = StageJob(spec, config, inputs, progress, LiveTraining(config).update)
        try:
            with _slot(job, reuse):
                outcome = run_stage(job, reuse)
        except BaseException as error:
            if _is_cancelled(error):
                spec.stop(job)
            raise
    return Completed(name="Cached" if outcome.cached else "Completed", message=outcome.ref.uri, data=outcome)


def step_task(step: Step) -> Task[..., State[StageOutcome]]:
    """`run_step` under the step's own name."""
    return run_step.with_options(name=step.name, task_run_name=step.name)


def _slot(job: StageJob, reuse: Reuse) -> AbstractContextManager[None]:
    """A slot of the limit on trainings, if the server has one and there is something to train."""
    will_train = job.spec.stage == "train" and reuse != "required" and (reuse == "never" or job.find() is None)
    if not will_train:
        return nullcontext()
    with get_client(sync_client=True) as client:
        try:
            client.read_global_concurrency_limit_by_name(TRAINING_LIMIT)
        except ObjectNotFound:
            return nullcontext()
    # A renewal that fails must not end a training: the worst that follows is a second one beside it.
    return concurrency(TRAINING_LIMIT, lease_duration=_LEASE_SECONDS, raise_on_lease_renewal_failure=False)


def _is_cancelled(error: BaseException) -> bool:
    """Whether a user ended the run. A machine that goes away (SIGTERM, no cancelling) leaves a cluster's job running,
    for the next run to find."""
    if isinstance(error, Exception):
        return False
    if isinstance(error, KeyboardInterrupt):
        return True
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return False
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(context.flow_run.id).state
    return state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)
