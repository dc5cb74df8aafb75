"""The flow 'retrain-drafter': from the prompts that have arrived to a new champion, or to the reasons why there is none.

    retrain_drafter(load_retrain_config("configs/retrain-demo.yaml"))

Started again after a kill at any moment, it takes up the same round: the same prompts, the same champion to beat, the stages that are
finished; and comes to the same decision.
"""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from dflash_core.retrain import RetrainConfig
from flows.train_drafter import run_stages
from tasks.retrain import Retraining, collect_prompts, promote
from tasks.run import Run


@flow(name="retrain-drafter", flow_run_name="{config.run.name}", retries=0, persist_result=False)
def retrain_drafter(
    config: RetrainConfig,
    dry_run: Annotated[bool, Field(description="Train, measure and decide, but move neither the champion nor the watermark.")] = False,
) -> State[Any]:
    """Train a drafter on new prompts, from the champion on, and promote it if it is better.

    Returns:
        A state whose data are ``summary``, ``promoted``, ``version`` and ``reasons``; where too few prompts have arrived ``summary`` alone.
    """
    with Retraining.open(config, dry_run=dry_run) as retraining:
        collect_prompts(retraining)
        if retraining.current is None:
            return Completed(message=retraining.nothing_new, data={"summary": retraining.nothing_new})
        with Run.open(retraining.pipeline) as run:
            run_stages(run)
            promote(run, retraining)
        return Completed(message=str(retraining.outcome["summary"]), data=retraining.outcome)
