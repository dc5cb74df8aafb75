"""What the machine does while a stage runs: MLflow's system metrics, sampled by MLflow's monitors and sent through the stage's journal.

MLflow's own sender gives up at the first request that fails; the journal waits for a server that is away.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from tasks.tracker import StageRecord

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def system_metrics(record: StageRecord) -> Iterator[None]:
    """Sample processors, memory, disk, network and GPUs while inside, every 10 s (or ``MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL``).

    GPUs need the package ``nvidia-ml-py``. A stage that is shorter has no sample.
    """
    if record.run_id is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_sample, args=(record, ended), name=f"system-{record.name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()  # the thread is asleep; nobody waits for it


def _sample(record: StageRecord, ended: threading.Event) -> None:
    try:
        monitor = _monitor(record)
        while not ended.wait(monitor.sampling_interval):
            monitor.collect_metrics()
            record.log_sample({f"system/{name}": value for name, value in monitor.aggregate_metrics().items()})
            for part in monitor.monitors:
                part.clear_metrics()
    except Exception as error:  # whatever a driver or a library does, the stage goes on
        logger.warning("System metrics are no longer recorded: %s", error)


def _monitor(record: StageRecord) -> Any:
    """MLflow's monitors, not started: its thread and its way of sending stay unused."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    return SystemMetricsMonitor(record.run_id, tracking_uri=record.uri)
