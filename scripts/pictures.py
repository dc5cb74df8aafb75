"""Pictures of what a person sees, for the documentation: form, flow run, comparison of runs.

    pip install -e '.[pipeline,pictures]' && python -m playwright install chromium       # or any Chromium of the system
    python -m scripts.pictures                                                           # about ten minutes on two cores

Starts the services in a temporary folder, deploys, has the worker do two short runs of the demo with different losses, looks at the
pages with a headless Chromium, writes ``docs/images`` and stops everything. Look at the pictures before they are committed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from flows.deploy import deploy, submit
from flows.services import ROOT, down, environment, up

if TYPE_CHECKING:
    from playwright.sync_api import Page, ViewportSize

IMAGES = ROOT / "docs" / "images"
CONFIG = ROOT / "configs" / "demo.yaml"
SHORT = ["data.sources.0.limit=90", "training.epochs=30", "training.max_steps=60", "evaluation.num_prompts=3", "evaluation.max_new_tokens=32"]
RUNS = {"decay": [], "dpace": ["objective.weighting=dpace"]}
SIZE: ViewportSize = {"width": 1440, "height": 900}
PATIENCE_S = 3600.0


def main() -> None:
    """Take all pictures."""
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder, services(Path(folder)), browser() as page:
        from prefect.client.orchestration import get_client  # after the services have started: Prefect reads its settings when it is imported

        deploy()
        with get_client(sync_client=True) as client:
            picture_of_form(page, client)
            runs = [begin(client, [f"run.workspace={folder}/workspace", f"run.name=demo-{name}", *SHORT, *more]) for name, more in RUNS.items()]
            wait_until(lambda: ended(client, runs[0]) or is_training(client, runs[0]))
            picture_of_flow(page, runs[0])
            wait_until(lambda: ended(client, runs[0]))
            picture_of_summary(page, client, runs[0])
            picture_of_report(page, Path(folder) / "workspace" / "runs")
            wait_until(lambda: ended(client, runs[1]))
        pictures_of_mlflow(page)


@contextlib.contextmanager
def services(folder: Path) -> Iterator[None]:
    """Prefect, MLflow and a worker, for this process too."""
    os.environ.update(environment(up(folder / "services")))
    try:
        yield
    finally:
        down(folder / "services")


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A page of a headless Chromium: Playwright's own, or the system's."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox"] if os.getuid() == 0 else [],
        )
        page = chromium.new_page(viewport=SIZE, color_scheme="light", timezone_id="UTC")
        page.add_init_script("localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false')")  # it takes a quarter of MLflow's pages
        page.add_init_script("localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')")
        yield page
        chromium.close()


def begin(client: Any, overrides: Sequence[str]) -> Any:
    """Submit a run of the demo. Returns the flow run."""
    submit(CONFIG, overrides, "train-drafter/demo", watch=False)
    return max(client.read_flow_runs(), key=lambda run: run.created)


def is_training(client: Any, run: Any) -> bool:
    """Whether a flow run has been training for some time."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])))
    return any(task.name == "train" and task.estimated_run_time.total_seconds() > 40 for task in tasks)


def ended(client: Any, run: Any) -> bool:
    """Whether a flow run is over. Raises ``RuntimeError`` if it did not complete."""
    state = client.read_flow_run(run.id).state
    if state.is_final() and not state.is_completed():
        raise RuntimeError(f"The run ended in the state {state.name}: {state.message}")
    return bool(state.is_final())


def wait_until(condition: Callable[[], bool]) -> None:
    """Ask every two seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("The run takes too long; see the worker's log.")
        time.sleep(2.0)


def picture_of_form(page: Page, client: Any) -> None:
    """The form in which a run is asked for."""
    deployment = client.read_deployment_by_name("train-drafter/demo")
    page.set_viewport_size({"width": SIZE["width"], "height": 1700})
    visit(page, f"{prefect_ui()}/deployments/deployment/{deployment.id}/run")
    save(page, "form")
    page.set_viewport_size(SIZE)


def picture_of_flow(page: Page, run: Any) -> None:
    """The time line of a flow run that trains, with its logs."""
    visit(page, f"{prefect_ui()}/runs/flow-run/{run.id}")
    save(page, "running")


def picture_of_summary(page: Page, client: Any, run: Any) -> None:
    """The summary that a flow run leaves as an artifact."""
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey

    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]), key=ArtifactFilterKey(any_=["summary"]))
    visit(page, f"{prefect_ui()}/artifacts/artifact/{client.read_artifacts(artifact_filter=wanted)[0].id}")
    save(page, "summary")


def picture_of_report(page: Page, runs: Path) -> None:
    """The page that a run leaves for people."""
    visit(page, next(runs.glob("*/report.html")).as_uri())
    save(page, "report")


def pictures_of_mlflow(page: Page) -> None:
    """The two runs side by side, and the training of one of them."""
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("dflash").experiment_id
    training = client.search_runs([experiment], "tags.`dflash.stage` = 'train'")[-1].info.run_id
    runs = f"{os.environ['MLFLOW_TRACKING_URI']}/#/experiments/{experiment}/runs"
    visit(page, f"{runs}?workflowType=machine_learning&compareRunsMode=CHART")
    save(page, "mlflow-runs")
    visit(page, f"{runs}/{training}/model-metrics?workflowType=machine_learning")
    page.get_by_placeholder("Search metric charts").fill("^(loss|token_accuracy|learning_rate|grad_norm|tokens_per_second|memory_rss)$")
    page.wait_for_timeout(3000)
    save(page, "mlflow-training")


def prefect_ui() -> str:
    """Address of Prefect's pages."""
    return os.environ["PREFECT_API_URL"].removesuffix("/api")


def visit(page: Page, url: str) -> None:
    """Open a page and let it come to rest; pages that keep a connection open never fall silent."""
    page.goto(url)
    page.wait_for_timeout(6000)


def save(page: Page, name: str) -> None:
    """Write a picture with a palette of 128 colours, which is small enough for a repository."""
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    page.goto("about:blank")  # Prefect's pages move, and drawing them takes half a core
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
