"""Stage 'warm_up': compile and run every shape of training once, before there are threads.

Leaves a live training session in this process for the task 'train', so both are called directly on the main thread and
neither is retried in place. There is nothing to cache: a new process warms up again, unless training is done.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from dflash_core import pipeline
from dflash_core.words import counted, duration
from tasks.run import Run


@task(name="warm-up", task_run_name="warm-up", cache_policy=NO_CACHE, retries=0)
def warm_up(run: Run) -> State[dict[str, Any]]:
    """Warm up the replicas. Call it directly."""
    with run.tracker.stage("warm_up") as record, run.watched("warm_up") as watched:
        report = pipeline.warm_up(run.plan)
        if report is None:
            watched.outcome = "not needed, training is done"
            record.set_tags({"dflash.cached": "true"})
            return Completed(name="Cached", message="training is done", data={})
        watched.outcome = f"done in {duration(report.seconds)}"
        record.log_params({"resumed_step": report.resumed_step, "total_steps": report.total_steps, "num_parameters": report.num_parameters})
        record.log_results({"seconds": report.seconds})
        for device in report.devices:
            facts = {name: value for name, value in asdict(device).items() if name not in ("replica", "device")}
            record.log_results({f"replica_{device.replica}_{name}": float(value) for name, value in facts.items()})
        if report.evaluator is not None:
            facts = {name: value for name, value in asdict(report.evaluator).items() if name != "device"}
            record.log_results({f"evaluator_{name}": float(value) for name, value in facts.items()})
        graphs, found = (sum(getattr(device, name) for device in report.devices) for name in ("graphs", "graphs_found"))
        compiled = f", {graphs} graphs, of which {found} had been compiled before" if graphs else ""
        return Completed(message=f"{counted(len(report.devices), 'replica')} in {report.seconds:.1f} s{compiled}", data=asdict(report))
