"""``dflashctl evaluate --server``: a drafter measured where it serves, beside the same server without it and beside our own figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_core.config import load_config
from dflash_core.errors import InputError, Problem
from dflash_core.evaluation.server import ServerComparison, ServerFigures, compare_servers, measure_server
from dflash_core.pipeline import evaluation_of, evaluation_prompts
from dflash_core.plan import Plan
from dflash_core.stages import write_json_atomic
from flows.console import console_watcher
from flows.one_stage import require
from flows.show import print_rows, standard_output
from tasks.progress import ProgressTeller


def evaluate_server(path: Path, overrides: Sequence[str], server: str | None, alone: str | None, concurrency: int, drafter: str | None) -> Path:
    """Send the held-out prompts and sets of a configuration to the servers, print what was measured, and write it down.

    Returns:
        ``server.json`` among the run's evaluations.

    Raises:
        InputError: no server with a drafter is named, or a drafter as well; or a set of prompts cannot be used.
        StageMissingError: the samples are not there yet.
        EndpointError: a server cannot be measured.
    """
    if server is None:
        raise InputError("dflashctl evaluate", [Problem("--alone", alone, "is compared with a server that drafts", "Name that with --server")])
    if drafter is not None:
        raise InputError("dflashctl evaluate", [Problem("--drafter", drafter, "a server has a drafter of its own", "Leave one of the two out")])
    plan = Plan(load_config(path, overrides), str(path))
    require(plan, path, "samples")
    settings = plan.config.evaluation
    prompts = [prompt.tokens for prompt in evaluation_prompts(plan)]

    def measured(url: str, drafts: bool) -> ServerFigures:
        watcher = console_watcher()
        watcher.begin("evaluate")
        teller = ProgressTeller("evaluate", watcher)
        try:
            with teller.running():
                figures = measure_server(
                    url,
                    prompts,
                    max_new_tokens=settings.max_new_tokens,
                    stop_ids=plan.info.eos_token_ids,
                    drafts=drafts,
                    concurrency=concurrency,
                    progress=teller,
                )
            teller.outcome = url
        finally:
            watcher.end("evaluate", teller.outcome)
        return figures

    drafted = measured(server, True)
    result = compare_servers(
        drafted,
        measured(alone, False) if alone else None,
        evaluation_of(plan.folder("evaluate")) if plan.stage("evaluate").cached else None,
    )
    _show(result)
    destination = plan.run_folder / "evaluations" / "server.json"
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(destination, result.model_dump(mode="json"))
    return destination


def _show(result: ServerComparison) -> None:
    drafted, alone, ours = result.drafted, result.alone, result.ours or {}
    acceptance = drafted.acceptance
    headings = ("", drafted.engine or "server", "without drafter", f"here, {result.ours_dtype}" if result.ours_dtype else "here")
    speeds = [drafted.tokens_per_second, alone.tokens_per_second if alone else None, ours.get("tokens_per_second")]
    rows: list[tuple[str, list[float | None]]] = [
        ("acceptance length, pooled", [acceptance.acceptance_length if acceptance else None, None, ours.get("acceptance_length_pooled")]),
        ("tokens/s", speeds),
        ("speed-up", [result.speedup, None, ours.get("speedup")]),
    ]
    rows += [
        (f"latency {name}, s", [drafted.latency_seconds[name], alone.latency_seconds[name] if alone else None, None])
        for name in ("p50", "p90", "p99")
    ]
    shares = acceptance.per_position if acceptance else ()
    rows += [(f"slot {slot} accepted", [share, None, ours.get(f"accepted_slot_{slot}")]) for slot, share in enumerate(shares, start=1)]
    shown = [(name, *("" if value is None else f"{value:,.3f}" for value in values)) for name, values in rows]
    print_rows(standard_output(), [dict(zip(headings, row, strict=True)) for row in shown])
    if result.same_text is not None:
        print(f"{result.same_text:.1%} of {drafted.prompts} prompts answered alike with and without the drafter")
    for note in (*drafted.notes, *(alone.notes if alone else ())):
        print(f"note: {note}")
