"""A share of an extraction, for a process elsewhere that knows nothing of the run but this.

    make_shards(ShardJob.model_validate(job))       # on any machine: makes shards until all are made, and leaves the rest to the run

Any number of such processes may do so at once. Those of one file system divide the shards by its locks, those of different ones through a store.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from dflash_core.config import ExtractionConfig, TargetConfig, devices_of
from dflash_core.data import SampleTable
from dflash_core.errors import TargetError
from dflash_core.shards.columns import card_of
from dflash_core.shards.extract import extract, is_to_do, target_threads
from dflash_core.shards.store import fetch_file
from dflash_core.stages import Progress, no_progress
from dflash_core.target import TargetInfo, TargetModel, resolve_target


class ShardJob(BaseModel):
    """What is to be extracted, and where it goes. All of it is small.

    target_digest: of the target that the run has; another one is refused
    samples:       a file of samples, or its address in the store
    folder:        where the shards go if there is no store
    shared:        address of the dataset in the store
    window:        of the drafter, as ``extract`` wants it
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    target: TargetConfig
    target_digest: str
    extraction: ExtractionConfig
    tap_layers: tuple[int, ...]
    samples: str
    folder: Path
    shared: str | None
    code_version: int
    window: int

    @property
    def gpus(self) -> int:
        """GPUs that one process takes: one, or as many as the target is spread over."""
        return sum(device != "cpu" for device in devices_of(self.target.device))


def make_shards(job: ShardJob, progress: Progress = no_progress) -> dict[str, Any]:
    """Make shards until all are made, by this process or others. Returns what ``extract`` says of this process's work.

    Of several GPUs a process takes the first that it sees: whoever starts it says which those are (CUDA_VISIBLE_DEVICES).

    Raises:
        TargetError: the target here is not the run's.
        ShardError: samples or store cannot be used, or as ``extract``.
    """
    info = resolve_target(job.target, progress=progress)
    if info.digest != job.target_digest:
        raise TargetError(
            f"target.model = {job.target.model!r} is another one here: its digest is {info.digest[:12]}…, that of the run {job.target_digest[:12]}…. "
            "Pin target.revision, or give every machine the same folder."
        )
    with tempfile.TemporaryDirectory(prefix="dflash-shards-") as scratch:
        samples, folder = Path(job.samples), job.folder
        if job.shared is not None:
            samples, folder = Path(scratch) / "samples.parquet", Path(scratch) / "shards"
            fetch_file(job.samples, samples)
        table, dtype = SampleTable.open(samples), job.target.dtype
        card = card_of(job.extraction, info, table, job.tap_layers, dtype, job.code_version, job.window)
        models = [_load(job, info)] if is_to_do(folder, card, job.shared) else []
        targets, heads = target_threads(models, job.extraction, job.tap_layers)
        return extract(
            job.extraction, info, targets, table, folder, tap_layers=job.tap_layers, target_dtype=dtype, code_version=job.code_version, heads=heads,
            window=job.window, shared=job.shared, finish=False, progress=progress,
        )  # fmt: skip


def _load(job: ShardJob, info: TargetInfo) -> TargetModel:
    devices = [device if device == "cpu" else f"cuda:{index}" for index, device in enumerate(devices_of(job.target.device))]
    return TargetModel.from_pretrained(info, dtype=job.target.dtype, device="+".join(devices), trust_remote_code=job.target.trust_remote_code)
