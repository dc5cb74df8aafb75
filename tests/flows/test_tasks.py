"""How tasks behave in Prefect: retries, cached states, logs and artifacts."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.context import FlowRunContext
from prefect.states import Completed

from dflash_core.config import PipelineConfig, load_config
from dflash_core.errors import ConfigError, ShardError
from flows.services import ROOT
from flows.train_drafter import train_drafter
from tasks.logs import flow_run_logs
from tasks.progress import LogWatcher, ProgressTeller
from tasks.run import Run, resumable
from tasks.shards import extract_shards
from tests.flows.newest import newest_run
from tests.tiny_run import write_tiny_run
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("error", "attempts"), [(OSError("network"), 2), (ShardError("damaged"), 1), (ConfigError("x", []), 1), (MemoryError(), 1)])
def test_a_stage_is_tried_again_after_a_network_or_disk_error_only(prefect_url: str, error: Exception, attempts: int) -> None:
    tried = []

    @resumable("stage")
    def stage(run: Any) -> Any:
        tried.append(run)
        if len(tried) == 1:
            raise error
        return Completed(name="Cached")

    @flow
    def try_it() -> None:
        stage.with_options(retry_delay_seconds=0)(None, return_state=True)

    try_it()
    assert len(tried) == attempts


def test_there_is_no_extraction_where_targets_feed_the_training() -> None:
    run = MagicMock()
    run.plan.extracts = False
    state = extract_shards.fn(run)
    assert (state.name, state.message) == ("Cached", "not needed, targets feed the training")
    run.do.assert_not_called()


def test_a_flow_that_torchrun_has_started_is_refused_and_so_is_one_that_torchrun_would_have_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(write_tiny_run(tmp_path), ["training.launcher=torchrun"])
    with pytest.raises(ConfigError, match="torchrun has not started this process"), Run.open(config):
        pass
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    with pytest.raises(ConfigError, match="flows are not started by torchrun"), Run.open(config):
        pass


def test_logs_and_progress_of_a_stage_appear_in_the_flow_run(prefect_url: str) -> None:
    seen: dict[str, Any] = {}

    @flow
    def watched() -> None:
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        seen["id"] = context.flow_run.id
        told = threading.Event()

        class Told(LogWatcher):
            def progress(self, *arguments: Any) -> None:
                told.set()

        watcher = Told()
        with flow_run_logs(), flow_run_logs():  # as a retraining has them, and its run
            watcher.begin("shards")
            teller = ProgressTeller("shards", watcher)
            with teller.running():
                teller(30, 120, "tokens")
                assert told.wait(PATIENCE_S)
                teller(60, 120, "tokens")
            thread = threading.Thread(target=logging.getLogger("dflash_core.training").warning, args=("replica 1 waits",))
            thread.start()
            thread.join()
            watcher.end("shards", "done in 1.0 s")

    watched()
    from prefect.logging.handlers import APILogWorker

    APILogWorker.instance().drain()
    with get_client(sync_client=True) as client:
        logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[seen["id"]])))
        (artifact,) = [item for item in client.read_artifacts() if item.flow_run_id == seen["id"]]
    messages = [item.message for item in logs]
    wanted = ["shards: begins", "replica 1 waits", "shards: done in 1.0 s"]
    assert [message for message in messages if message in wanted] == wanted, "each once"
    assert (artifact.key, artifact.type, float(artifact.data)) == ("shards-progress", "progress", 50.0)
    assert re.fullmatch(r"60 of 120 tokens, .* s left", artifact.description)


def test_the_flow_takes_the_whole_configuration_as_json_and_checks_it(prefect_url: str, tiny_config: Any) -> None:
    config = load_config(tiny_config)
    given = train_drafter.validate_parameters({"config": config.model_dump(mode="json")})
    assert given["config"] == config
    from prefect.exceptions import ParameterTypeError

    wrong = config.model_dump(mode="json")
    wrong["training"]["epochs"] = 0
    with pytest.raises(ParameterTypeError, match=r"training\.epochs"):
        train_drafter.validate_parameters({"config": wrong})
    schema = train_drafter.parameters.model_dump()
    assert "TrainingConfig" in schema["definitions"]
    assert isinstance(given["config"], PipelineConfig)


ORPHAN = """\
import logging
import os
from prefect import flow
from tasks.logs import flow_run_logs

reader, writer = os.pipe()  # by which a worker reads what its runs print
os.dup2(writer, 1)
os.dup2(writer, 2)
os.close(writer)

@flow(name="orphan")
def orphan():
    os.close(reader)
    with flow_run_logs():
        for step in (1, 2):
            logging.getLogger("dflash_core").warning("step %d", step)
            print("step", step, flush=True)

orphan()
"""


def test_a_run_whose_worker_has_died_goes_on_and_its_log_reaches_the_server(prefect_url: str) -> None:
    finished = subprocess.run([sys.executable, "-c", ORPHAN], cwd=ROOT, env=os.environ | {"PREFECT_API_URL": prefect_url}, check=False)
    assert finished.returncode == 0
    run, _, _ = newest_run()
    with get_client(sync_client=True) as client:
        logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])))
    assert (run.state.name, [item.message for item in logs if item.name == "dflash_core"]) == ("Completed", ["step 1", "step 2"])
