"""The flow 'evaluate-drafter': a drafter that is there, measured on the held-out prompts of a configuration.

evaluate_drafter(load_config("configs/demo.yaml"), drafter="champion")
"""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from dflash_core.config import PipelineConfig
from tasks.evaluate import measure_drafter
from tasks.responses import build_responses
from tasks.run import Run
from tasks.samples import write_samples
from tasks.target import fetch_target


@flow(name="evaluate-drafter", flow_run_name="{config.run.name}", retries=0, persist_result=False)
def evaluate_drafter(
    config: PipelineConfig,
    drafter: Annotated[str, Field(description="A drafter's folder, 'champion', or the number of a registered version.")] = "champion",
) -> dict[str, Any]:
    """Measure losslessness, acceptance and speed of a drafter; its MLflow run is named after the configuration, with '-evaluation'.

    Returns:
        The headline figures.
    """
    own = config.run.model_copy(update={"name": f"{config.run.name}-evaluation"})  # the training's own run and folder are left alone
    with Run.open(config.model_copy(update={"run": own})) as run:
        fetch_target(run)
        build_responses(run)
        write_samples(run)
        return measure_drafter(run, drafter)
