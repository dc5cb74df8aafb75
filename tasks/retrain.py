"""The two ends of a retraining: which prompts it takes, and whether its drafter becomes the champion.

What lies between is a training as any other. Prompts, rounds and the decision itself are in ``dflash_core.retrain``.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from dflash_core.config import PipelineConfig
from dflash_core.drafter.checkpoint import read_drafter_config
from dflash_core.errors import ConfigError, DFlashError, InputError, Problem
from dflash_core.evaluation import EvaluationResult, compare_with_untrained
from dflash_core.evaluation.plots import write_comparison
from dflash_core.pipeline import evaluation_of
from dflash_core.retrain import RetrainConfig
from dflash_core.retrain.decision import Decision, decide
from dflash_core.retrain.rounds import Round, Rounds, pipeline_config
from dflash_core.retrain.watermark import arrived_files
from dflash_core.words import counted
from tasks.logs import flow_run_logs
from tasks.registry import CHAMPION, Registry, Version, fetched
from tasks.run import Run, publish
from tasks.store import database_to_make, open_client, tracking_uri
from tasks.summary import linked

logger = logging.getLogger(__name__)


class Retraining:
    """A target's retraining, held for this process: its rounds, its registered models, the round that is going on and its outcome."""

    def __init__(self, config: RetrainConfig, rounds: Rounds, registry: Registry, *, dry_run: bool):
        """Use ``Retraining.open``."""
        self.dry_run = dry_run
        self.config = config
        self.rounds = rounds
        self.registry = registry
        self.name = registry.name_of(config.target.model)
        self.current: Round | None = None
        self.champion: Path | None = None
        self.place: Path | None = None  # of a round that is only foreseen
        self.outcome: dict[str, Any] = {}

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: RetrainConfig, *, dry_run: bool = False) -> Iterator[Retraining]:
        """The retraining of the target of a configuration.

        In a dry run the round is trained and judged, and left open: neither the alias nor the watermark moves, and the next retraining that is not
        dry takes it up.

        A round whose prompts or settings prove to be unusable inside is given up, so that corrected ones are read by the next.

        Raises:
            RetrainBusyError: another process retrains this target.
            TrackingError: the MLflow store cannot be used.
        """
        client, uri = open_client(config)
        registry = Registry(client, uri)
        rounds = Rounds(config.run.workspace / "retrain" / registry.name_of(config.target.model))
        with rounds.held(), flow_run_logs():
            retraining = cls(config, rounds, registry, dry_run=dry_run)
            try:
                yield retraining
            except InputError:
                if retraining.current is not None and rounds.decision(retraining.current) is None:
                    rounds.give_up(retraining.current)
                raise

    def begin(self, draft: Path | None = None) -> Round | None:
        """Take up the round that an earlier process began, or begin one; with ``draft`` a new one is written there alone. None: too little is new."""
        current = self.rounds.begun()
        if current is not None:
            self.rounds.check(self.config)
            logger.info("Round %d, begun at %s, is taken up: %s.", current.number, current.begun, _prompts(current))
            version = self._begun_from(current)
        else:
            version = self.registry.champion(self.name)
        if version is not None:
            self.champion = self._fetched(version)
        if current is None:
            number = version.number if version is not None else None
            self.place = draft
            current = self.rounds.open(self.config, number) if draft is None else self.rounds.choose(self.config, number, draft)
        self.current = current
        return current

    @property
    def pipeline(self) -> PipelineConfig:
        """The configuration of this round's training."""
        assert self.current is not None
        return pipeline_config(self.config, self.place or self.rounds.place(self.current.number), self.current, self.champion)

    @property
    def foreseen(self) -> str:
        """The round in a sentence."""
        assert self.current is not None
        begun = "not begun yet" if self.place is not None else f"begun at {self.current.begun}"
        start = f"from version {self.current.champion} on" if self.current.champion is not None else "without a champion"
        return f"Round {self.current.number} of {self.name}, {begun}: {_prompts(self.current)}, {start}. {self.unused}".rstrip()

    @property
    def nothing_new(self) -> str:
        """Why nothing is done, in a sentence."""
        wanted, last = self.config.retrain.min_new_prompts, self.rounds.watermark.round
        return f"{'No' if wanted == 1 else f'Fewer than {wanted}'} new prompts since round {last}: nothing to do. {self.unused}".rstrip()

    @property
    def unused(self) -> str:
        """How much of what has arrived cannot be used, and where nothing arrives, in sentences; empty where all is well."""
        empty = ", ".join(pattern for pattern in self.config.retrain.prompts if not arrived_files([pattern]))
        rejected = f"Of what has arrived, {self.rounds.rejected}" if self.rounds.rejected else ""
        return " ".join(filter(None, (rejected, f"No file is found by {empty} (retrain.prompts)." if empty else "")))

    def _begun_from(self, current: Round) -> Version | None:
        if current.champion is None:
            return None
        version = self.registry.version(self.name, current.champion)
        if version is None:
            place = self.rounds.place(current.number)
            message = f"Round {current.number} of {self.name} was begun from version {current.champion}, which is not in the MLflow store any more."
            raise DFlashError(f"{message} Correct tracking.uri, or move {place} away: its prompts are then read afresh, for the champion of now.")
        return version

    def _fetched(self, version: Version) -> Path:
        """The champion's folder. It must draft blocks as long as the challenger's: they are compared as they are served."""
        folder = fetched(self.registry, version, self.config.run.workspace)
        found, wanted = read_drafter_config(folder).block_size, self.config.drafter.block_size
        if found != wanted:
            remedy = f"Set it to {found}; for another, train a drafter (train-drafter) and give it the alias '{CHAMPION}' by hand"
            raise ConfigError("retrain", [Problem("drafter.block_size", wanted, f"the champion, {version}, drafts blocks of {found}", remedy)])
        return folder


@contextlib.contextmanager
def foreseen(config: RetrainConfig) -> Iterator[tuple[str, PipelineConfig | None]]:
    """What a retraining would do now, in a sentence, and the configuration of its training; None where it would do nothing.

    The champion is fetched, as a retraining would. Otherwise nothing is written, and another process may be retraining meanwhile.

    Raises:
        TrackingError: the MLflow store cannot be used.
        InputError: prompts or settings cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="dflash-round-") as scratch:
        uri = tracking_uri(config)
        registry = Registry(*open_client(config)) if database_to_make(uri) is None else Registry(None, uri)
        rounds = Rounds(config.run.workspace / "retrain" / registry.name_of(config.target.model))
        retraining = Retraining(config, rounds, registry, dry_run=True)
        if retraining.begin(Path(scratch) / "round") is None:
            yield retraining.nothing_new, None
        else:
            yield retraining.foreseen, retraining.pipeline


@task(name="collect-prompts", task_run_name="collect-prompts", cache_policy=NO_CACHE, retries=0)
def collect_prompts(retraining: Retraining) -> State[dict[str, Any]]:
    """Choose the prompts of this round, or find that there are too few."""
    current = retraining.begin()
    if current is None:
        message = retraining.nothing_new
        logger.info(message)
        publish(lambda: create_markdown_artifact(f"# {retraining.name}\n\n{message}\n", key="retraining", description="Nothing new"))
        return Completed(name="NothingNew", message=message, data={})
    facts = current.model_dump(mode="json", exclude={"files"})
    return Completed(message=f"round {current.number}: {_prompts(current)}", data=facts)


@task(name="promote", task_run_name="promote", cache_policy=NO_CACHE, retries=0)
def promote(run: Run, retraining: Retraining) -> State[dict[str, Any]]:
    """Decide, move the alias if the new drafter is better, tell why, and only then move the watermark. A dry run decides and tells."""
    current, rounds = retraining.current, retraining.rounds
    assert current is not None
    if run.version is None:
        raise DFlashError(f"The drafter is not registered in MLflow ({run.tracker.uri}), so it cannot be promoted. See the log; start again.")
    evaluation = evaluation_of(run.results["evaluate"].folder)
    decision = rounds.decision(current) or decide(evaluation, margin=retraining.config.retrain.margin, champion=current.champion)
    promoted, reasons = decision.promote, decision.reasons
    if not retraining.dry_run:
        rounds.decide(current, decision)
        if promoted:
            promoted, reasons = _moved(retraining, current, run.version, reasons)
    outcome = ("would be " if retraining.dry_run else "") + ("promoted" if promoted else "refused")
    retraining.registry.set_tags(run.version, {"dflash.decision": outcome, "dflash.compared_with": decision.champion or "nobody"})
    run.tracker.set_tags({"dflash.decision": outcome})
    markdown = in_markdown(run.version, retraining.registry.page(run.version), current, decision, outcome, reasons)
    _record(run, decision, evaluation, markdown)
    publish(lambda: create_markdown_artifact(markdown, key="retraining", description=f"{run.version}: {outcome}"))
    if not retraining.dry_run:
        rounds.close(current)
    logger.info("%s: %s. %s", run.version, outcome, " ".join(reasons))
    moved = promoted and not retraining.dry_run
    retraining.outcome = {"summary": f"{run.version}: {outcome}", "promoted": moved, "version": run.version.number, "reasons": list(reasons)}
    return Completed(message=f"{run.version}: {outcome}", data=retraining.outcome)


def _prompts(current: Round) -> str:
    """``1 new prompt and 20 old ones``."""
    return f"{counted(current.new, 'new prompt')} and {counted(current.replayed, 'old one')}"


def _moved(retraining: Retraining, current: Round, version: Version, reasons: tuple[str, ...]) -> tuple[bool, tuple[str, ...]]:
    """Whether the alias is at the version now, and the reasons with what kept it elsewhere."""
    now = retraining.registry.champion(retraining.name)
    if (now.number if now is not None else None) in (current.champion, version.number):
        retraining.registry.promote(version)
        return True, reasons
    return False, (*reasons, f"But the alias was moved by somebody else meanwhile, to {now or 'nothing'}, and stays there.")


def _record(run: Run, decision: Decision, evaluation: EvaluationResult, markdown: str) -> None:
    """The decision, its reasons and figures, in MLflow: for people, for programs, and as a picture."""
    run.tracker.log_text(markdown, "decision.md")
    run.tracker.log_text(decision.model_dump_json(indent=2), "decision.json")
    if decision.champion_length is not None:
        run.tracker.log_metrics({"champion_acceptance_length": decision.champion_length})
    if (found := decision.comparison) is not None:
        interval = {"challenger_gain_low": found.interval.low, "challenger_gain_high": found.interval.high} if found.interval else {}
        run.tracker.log_metrics({"challenger_gain": found.difference, "challenger_gain_p": found.p_value, **interval})
    comparison = compare_with_untrained(evaluation, f"version {decision.champion}", "challenger") if decision.champion is not None else None
    if comparison is not None:
        run.tracker.log_artifact(write_comparison(run.plan.run_folder / "plots" / "comparison.png", comparison), "plots")


def in_markdown(version: Version, page: str | None, current: Round, decision: Decision, outcome: str, reasons: tuple[str, ...]) -> str:
    """A page that says what was decided (promoted, refused, would be promoted, would be refused), why, and from what."""
    heading = {"promoted": "a new champion", "refused": "the champion stays" if decision.champion else "no champion yet"}
    dry_run = f"a dry run, in which nothing was moved: it {outcome}"
    before = "none" if decision.champion is None else f"version {decision.champion}"
    length = "" if decision.champion_length is None else f"{decision.champion_length:.3f}"
    lines = [
        f"# {version.name}: {heading.get(outcome, dry_run)}",
        "",
        f"{linked(str(version), page)} {'is ' if outcome in heading else ''}**{outcome}**.",
        "",
        *(f"- {reason}" for reason in reasons),
        "",
        "| | champion | challenger |",
        "|---|---|---|",
        f"| version | {before} | {version.number} |",
        f"| acceptance length, mean of requests | {length} | {decision.challenger_length:.3f} |",
        *_difference(decision),
        f"| lossless | | {decision.lossless:.1%} of {decision.prompts} prompts |",
        "",
        f"Round {current.number}: {_prompts(current)}; {counted(current.heldout, 'prompt')} held out in all rounds.",
    ]
    return "\n".join(lines) + "\n"


def _difference(decision: Decision) -> list[str]:
    found = decision.comparison
    if found is None:
        return []
    interval = f" (95 % interval {found.interval.low:+.3f} to {found.interval.high:+.3f})" if found.interval else ""
    return [
        f"| difference, prompt by prompt | | {found.difference:+.3f}{interval} |",
        f"| better, worse | | on {found.better} and {found.worse} of {found.prompts} prompts |",
        f"| paired test | | p = {found.p_value:.2g} |",
    ]
