"""Run a flow in this process, with a console that shows it: what ``dflashctl run`` and ``dflashctl retrain`` do."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dflash_core.config import PipelineConfig, load_config
from dflash_core.errors import ConfigError
from dflash_core.retrain.config import load_retrain_config
from flows.server import prefect_api

Result = TypeVar("Result")

_QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",  # the console has its own show; the server gets all logs
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",  # prefect_api has started a server; a second one would be a mistake
}


def run_here(path: Path, overrides: Sequence[str]) -> None:
    """Check the configuration, run 'train-drafter', and print what has come out.

    Raises:
        ConfigError: before anything is begun.
        DFlashError: a stage failed.
        KeyboardInterrupt: of the user, after what runs has saved its work.
    """
    config = load_config(path, overrides)

    def flow() -> Path:
        from flows.train_drafter import train_drafter

        return train_drafter(config)

    summary = _run(flow, config, path)
    from flows.outcome import print_outcome

    print_outcome(config, summary)


def retrain_here(path: Path, overrides: Sequence[str], *, dry_run: bool = False) -> dict[str, Any]:
    """Check the configuration and run 'retrain-drafter'.

    Returns:
        ``summary``, ``promoted``, ``version`` and ``reasons``; ``summary`` alone where too few prompts have arrived.

    Raises as ``run_here`` does.
    """
    config = load_retrain_config(path, overrides)

    def flow() -> dict[str, Any]:
        from flows.retrain_drafter import retrain_drafter

        outcome: Any = retrain_drafter(config, dry_run)  # the data of the state that it returns
        return dict(outcome)

    return _run(flow, config, path)


def _run(flow: Callable[[], Result], config: PipelineConfig, path: Path) -> Result:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)

    def check() -> None:
        """Heavy imports, and checks that need them: work to do while the server starts."""
        from dflash_core.checks import advice
        from dflash_core.plan import Plan

        Plan(config, str(path))
        for sentence in advice(config):
            print(f"Note: {sentence}", file=sys.stderr)
        import flows.train_drafter  # noqa: F401

    with prefect_api(meanwhile=check):
        try:
            return _shown(flow)
        except ConfigError as error:
            raise ConfigError(str(path), error.problems) from error  # the flow knows the settings, not the file they are from


def _shown(flow: Callable[[], Result]) -> Result:
    from prefect.exceptions import TerminationSignal
    from prefect.logging.configuration import setup_logging

    from flows.console import console_watcher
    from tasks.progress import watcher

    setup_logging()
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).propagate = False  # an error reaches the user once, from the command line, not as a traceback
    token = watcher.set(console_watcher())
    try:
        return flow()
    except TerminationSignal as signal:
        raise KeyboardInterrupt from signal  # told to end from outside: to the user the same as Ctrl-C
    finally:
        watcher.reset(token)
