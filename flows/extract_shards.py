"""The flow 'extract-shards': processes on a Ray cluster divide the shards of a run.

    make_shards_on_ray(run)        # nothing, unless extraction.ray.workers says so; the stage 'shards' then finds all shards made

Which of them makes what is settled among them, by locks of a common file system or claims in a store, so nothing is assigned here, and one that dies
costs the shard that it had open.
"""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.futures import PrefectFuture
from prefect.task_runners import TaskRunner

from dflash_core.config import RayConfig
from dflash_core.pipeline import shard_job
from dflash_core.shards.job import ShardJob
from tasks.ray_shards import make_shards
from tasks.run import Run


def make_shards_on_ray(run: Run) -> None:
    """Have the shards of a run made on the cluster that its configuration names.

    Raises:
        DFlashError: a process failed; what is finished is kept.
    """
    ray = run.plan.config.extraction.ray
    job = shard_job(run.plan) if ray.workers else None
    if job is not None:
        divide_shards.with_options(task_runner=ray_runner(ray))(job.model_dump(mode="json"), ray.workers)


@flow(name="extract-shards", retries=0, persist_result=False)
def divide_shards(job: dict[str, Any], workers: int) -> list[dict[str, Any]]:
    """Run so many processes, each with its GPUs, until all shards are made; returns what each of them has done."""
    from prefect_ray.context import remote_options  # an extra

    with remote_options(num_cpus=1, num_gpus=ShardJob.model_validate(job).gpus):
        futures: list[PrefectFuture[dict[str, Any]]] = [make_shards.submit(job) for _ in range(workers)]
    return [future.result() for future in futures]


def ray_runner(ray: RayConfig, **local: Any) -> TaskRunner[Any]:
    """The task runner of a cluster. ``local``: arguments of ``ray.init`` where it is one on this machine alone."""
    from prefect_ray import RayTaskRunner  # an extra

    return RayTaskRunner(address=ray.address, init_kwargs={"include_dashboard": False, **local} if ray.address is None else {})
