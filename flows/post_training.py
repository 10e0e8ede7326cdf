"""The flow `miles`: RL post-training of a language model, from a checkpoint to a published one.

It only orders the steps and hands references to artifacts from one to the next. What the steps are and how they hang
together is in tasks/pipeline.py; how each of them is cached in tasks/stage.py.
"""

from prefect import flow
from prefect.runtime import flow_run
from prefect.settings import get_current_settings

from flows.summary import RunSummary, summarize
from miles_core.config.run import RunConfig, Stage
from storage.store import ArtifactStore
from tasks.artifacts import publish_lineage, publish_scores
from tasks.pipeline import PIPELINE, reuse_of
from tasks.stage import StageOutcome
from tasks.stage_task import step_task


@flow(name="miles", flow_run_name="{config.name}", persist_result=False)
def miles(config: RunConfig, refresh: tuple[Stage, ...] = (), from_stage: Stage | None = None) -> RunSummary:
    """Download, convert, quantize, train, export, evaluate, upload; what is in the store already is not done again.

    Args:
        config: everything that the run depends on.
        refresh: stages to run again even if their results are in the store.
        from_stage: run this stage and all after it again; the results of those before it must be in the store.
    """
    done: dict[str, StageOutcome] = {}
    try:
        for step in PIPELINE:
            reuse = reuse_of(step.spec.stage, refresh, from_stage)
            done[step.name] = step_task(step)(step.name, config, step.inputs(done), reuse).result()
    except BaseException as error:
        publish_lineage(config.name, done, failure=f"{type(error).__name__}: {error}")
        raise
    publish_lineage(config.name, done, failure=None)
    store = ArtifactStore(config.store.uri, config.store.endpoint_url)
    initial, exported = (store.manifest(done[name].ref).account for name in ("evaluate-initial", "evaluate-exported"))
    publish_scores(config.name, initial, exported)
    return summarize(config, done, ui=f"{get_current_settings().ui_url or ''}/runs/flow-run/{flow_run.id}")
