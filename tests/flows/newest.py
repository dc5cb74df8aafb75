"""The newest flow run as a Prefect server has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter, FlowRunFilterId

from tests.waiting import eventually


def newest_run(enough: Callable[[dict[str, str]], object] = lambda tasks: True) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """(flow run, name of the state of each task, artifact of each key), once the tasks are ``enough``.

    A run is told its own state at once. Those of its tasks travel as events, and a server has them when it has got round to them.
    """
    with get_client(sync_client=True) as client:
        run = max(client.read_flow_runs(), key=lambda item: item.created)
        wanted, tasks = FlowRunFilter(id=FlowRunFilterId(any_=[run.id])), {}

        def arrived() -> object:
            tasks.update({item.name: item.state.name for item in client.read_task_runs(flow_run_filter=wanted) if item.state is not None})
            return enough(tasks)

        eventually(arrived, 0.1)
        artifacts = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id])))
    return run, tasks, {item.key: item for item in artifacts}
