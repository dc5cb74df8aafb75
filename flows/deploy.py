"""``dflashctl deploy`` and ``dflashctl submit``: runs that a worker does, asked for from the command line.

``prefect.yaml`` says what is deployed. The parameters of a deployment are a whole configuration, copied from the file that
the comment behind its ``parameters:`` names, so that Prefect's form shows every setting with its value.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from dflash_core.config import PipelineConfig
from dflash_core.errors import ConfigError, DFlashError, Problem
from dflash_core.retrain.config import RetrainConfig, load_any_config
from dflash_core.stages import atomic_write
from dflash_core.words import counted
from flows.server import ServerError, answers, configured_url
from flows.services import POOL, ROOT

PREFECT_YAML = ROOT / "prefect.yaml"

_PREFECT = (sys.executable, "-m", "prefect", "--no-prompt")
_PARAMETERS = re.compile(r"^( *)parameters:  # (\S+\.yaml)\n(?:\1 .*\n)*", re.MULTILINE)


class DeploymentError(DFlashError):
    """Prefect did not deploy, or a run that was waited for did not complete. Prefect has said why."""


def deploy() -> None:
    """Create the work pool if there is none and deploy all of ``prefect.yaml``, with the configurations as they are now.

    Raises:
        ServerError: no Prefect server is named, or it does not answer.
        ConfigError: a configuration that is to be deployed is wrong.
        DeploymentError: Prefect refuses.
    """
    text = PREFECT_YAML.read_text(encoding="utf-8")
    current = with_current_parameters(text)
    if current != text:
        with atomic_write(PREFECT_YAML) as temporary:
            temporary.write_text(current, encoding="utf-8")
        print(f"{PREFECT_YAML}: brought up to date with the configurations that it names")
    url = _server()
    create_pool()
    if subprocess.run([*_PREFECT, "deploy", "--all"], cwd=ROOT, env={**os.environ, "PREFECT_API_URL": url}, check=False).returncode:
        raise DeploymentError("Prefect did not deploy everything; its message is above.")


def submit(path: Path, overrides: Sequence[str], deployment: str, watch: bool) -> None:
    """Check a configuration, then send all of it to a deployment.

    Where the server is on this machine, so is its worker: files, devices and the target are then checked too.

    Args:
        deployment: ``flow/name``.
        watch: follow the run until it ends.

    Raises:
        ConfigError: nothing was sent.
        ServerError: no Prefect server is named, or it does not answer.
        DeploymentError: Prefect refuses, or the run that was watched did not complete.
    """
    config = load_any_config(path, overrides)
    _check_kind(config, str(path), deployment)
    url = _server()
    if urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1"):
        from dflash_core.plan import Plan

        with contextlib.chdir(ROOT):  # where the worker runs it: relative paths mean the same
            Plan(config, str(path))
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.utilities.urls import url_for

    from flows.watch import watch as follow

    with temporary_settings({PREFECT_API_URL: url}):
        run = _created(config, deployment)
        print(summary_of(config, overrides, deployment, str(run.id), url_for(run)))
        try:
            state = follow(run.id) if watch else None
        except KeyboardInterrupt:
            print(f"No longer watching. The run goes on; 'prefect flow-run cancel {run.id}' ends it.", file=sys.stderr)
            return
    if state is not None and not state.is_completed():
        raise DeploymentError(why_not_completed(state))


def summary_of(config: PipelineConfig, overrides: Sequence[str], deployment: str, run_id: str, page: str | None) -> str:
    """What was asked for, in a few lines: everything else is on the run's page."""
    training = config.training
    length = counted(training.epochs, "epoch") if training.max_steps is None else counted(training.max_steps, "step")
    lines = {
        "target": config.target.model,
        "data": ", ".join(item.source for item in config.data.sources),
        "drafter": f"{counted(config.drafter.num_layers, 'layer')}, blocks of {config.drafter.block_size}",
        "training": f"{length} on {', '.join(training.devices)}",
        "changed": " ".join(overrides),
        "page": page,
    }
    heading = f"{config.run.name} is submitted to {deployment} (flow run {run_id})"
    return "\n".join([heading, *(f"  {name:9s} {value}" for name, value in lines.items() if value)])


def _check_kind(config: PipelineConfig, source: str, deployment: str) -> None:
    """A retraining is for 'retrain-drafter', and nothing else is. Raises ``ConfigError``."""
    flow, retrains = deployment.partition("/")[0], isinstance(config, RetrainConfig)
    if retrains and flow in ("train-drafter", "evaluate-drafter"):
        remedy = "Send it with --deployment retrain-drafter/demo, or take the section out"
        raise ConfigError(source, [Problem("retrain", "(a section)", f"{deployment} knows no such section", remedy)])
    if flow == "retrain-drafter" and not retrains:
        remedy = "Add it, as configs/retrain-demo.yaml has it, or send it with --deployment train-drafter/demo"
        raise ConfigError(source, [Problem("retrain", None, f"{deployment} needs this section", remedy)])


def _created(config: PipelineConfig, deployment: str) -> Any:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(deployment)
        except (ObjectNotFound, ValueError) as error:  # ValueError: not of the form flow/name
            flows = {item.id: item.name for item in client.read_flows()}
            known = sorted(f"{flows[item.flow_id]}/{item.name}" for item in client.read_deployments() if item.flow_id in flows)
            raise DeploymentError(f"'{deployment}' is not deployed; what is: {', '.join(known) or 'nothing yet (dflashctl deploy)'}.") from error
        try:
            return client.create_flow_run_from_deployment(found.id, parameters=parameters_of(config), name=config.run.name)
        except PrefectHTTPStatusError as error:
            raise DeploymentError(f"Prefect refuses the run: {error.response.text}") from error


def why_not_completed(state: Any) -> str:
    """Why a run ended in this state, in its own words, and what to do."""
    words = str(state.message or "it has not said why").removeprefix("Flow run encountered an exception: ")
    remedy = "Correct that and submit it again: it goes on" if state.is_failed() else "Submitted again, it goes on"
    return f"The run did not complete, it ended in the state {state.name}: {words}\n{remedy} from what is done."


def parameters_of(config: PipelineConfig) -> dict[str, object]:
    """The parameters of a flow run, in JSON's types."""
    return {"config": config.model_dump(mode="json")}


def with_current_parameters(text: str) -> str:
    """The text of ``prefect.yaml`` with the parameters of each deployment as the configuration that it names has them."""

    def block(match: re.Match[str]) -> str:
        indent, path = match.groups()
        body = yaml.safe_dump(parameters_of(load_any_config(ROOT / path)), sort_keys=False, width=140, allow_unicode=True)
        return f"{indent}parameters:  # {path}\n" + textwrap.indent(body, indent + "  ")

    return _PARAMETERS.sub(block, text)


def _server() -> str:
    url = configured_url()
    if url is None:
        raise ServerError("No Prefect server is named. Start one (dflashctl up), or set PREFECT_API_URL.")
    if not answers(url):
        raise ServerError(f"The Prefect server {url} does not answer. Start it (dflashctl up), or correct PREFECT_API_URL.")
    return url


def create_pool() -> None:
    """Create the work pool. A pool that is there already may have been adapted by its owner, and stays as it is."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    with get_client(sync_client=True) as client, contextlib.suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
