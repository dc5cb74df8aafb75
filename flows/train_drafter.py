"""The flow 'train-drafter': from prompts to an exported, evaluated drafter.

    train_drafter(load_config("configs/demo.yaml"))

Tasks are called directly, one after the other, on the main thread: the target's and the drafter's live models stay in this
process. Started again with the same configuration, finished stages are found and verified, and the others go on.
"""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from dflash_core.config import PipelineConfig
from flows.extract_shards import make_shards_on_ray
from tasks.evaluate import evaluate_drafter
from tasks.export import export_drafter
from tasks.responses import build_responses
from tasks.run import Run
from tasks.samples import write_samples
from tasks.shards import extract_shards
from tasks.summary import summarise
from tasks.target import fetch_target
from tasks.train import train_drafter as train
from tasks.warm_up import warm_up


@flow(name="train-drafter", flow_run_name="{config.run.name}", retries=0, persist_result=False)
def train_drafter(config: PipelineConfig) -> Path:
    """Train, evaluate and export a DFlash drafter.

    Returns:
        Path of ``summary.json`` in the run's folder.
    """
    with Run.open(config) as run:
        return run_stages(run)


def run_stages(run: Run) -> Path:
    """All stages of a run, in order, and its summary; returns the path of that."""
    fetch_target(run)
    build_responses(run)
    write_samples(run)
    make_shards_on_ray(run)
    extract_shards(run)
    warm_up(run)
    train(run)
    evaluate_drafter(run)
    export_drafter(run)
    return summarise(run)
