"""Shards made elsewhere: the task that each process of a Ray cluster runs."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from dflash_core.shards import job as core


@task(name="make-shards", cache_policy=NO_CACHE, persist_result=False)
def make_shards(job: dict[str, Any]) -> dict[str, Any]:
    """Make shards of a ``ShardJob`` until all are made, by this process or others; the counts of this one's work.

    Ray starts it again elsewhere where a machine dies: what was whole is found then.
    """
    return core.make_shards(core.ShardJob.model_validate(job))
