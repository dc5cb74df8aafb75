"""The command line ``dflashctl``.

    dflashctl run configs/demo.yaml --set training.max_steps=50

Heavy libraries are imported inside the commands that need them, so that ``--help`` and ``validate`` answer at once.
Exit status: 0 done, 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from dflash_core.errors import DFlashError, InputError, os_reason
from dflash_core.words import counted
from tasks.unread import drop_unread

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
shards_app = typer.Typer(no_args_is_help=True, help="Hidden-state datasets.")
config_app = typer.Typer(no_args_is_help=True, help="Configuration files.")
app.add_typer(shards_app, name="shards")
app.add_typer(config_app, name="config")

P = ParamSpec("P")
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, such as configs/demo.yaml.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="a.b=value", help="Change a setting; repeatable.")]
ServicesFolder = Annotated[Path, typer.Option("--folder", envvar="DFLASH_SERVICES", help="Where the services keep data, logs and state.")]
SERVICES = Path("workspace/services")


def print_version(wanted: bool) -> None:
    """Print the version of what is installed, and end."""
    if wanted:
        print(f"dflashctl {metadata.version('dflash-pipeline')}")
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=print_version)] = False,
) -> None:
    """Train DFlash drafters and look at what they do."""


def told(command: Callable[P, None]) -> Callable[P, None]:
    """What a user has caused or can do something about is told without a traceback, by message and exit status.

    Whoever has stopped reading what is printed (``| head``) is told nothing.
    """

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except InputError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(2) from error
        except (DFlashError, OSError) as error:  # OSError: a disk that is full, a folder that may not be written
            if not (isinstance(error, BrokenPipeError) and drop_unread(sys.stdout.fileno())):
                print(f"{type(error).__name__}: {os_reason(error) if isinstance(error, OSError) else error}", file=sys.stderr)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            print("Interrupted. The same command goes on from here.", file=sys.stderr)
            raise typer.Exit(130) from error

    return guarded


@app.command()
@told
def run(config: ConfigPath, overrides: Overrides = None) -> None:
    """Run the whole pipeline here and now.

    Finished stages are found and verified. Says last what has come out and where it is: the path of summary.json is the last line.
    """
    from flows.here import run_here
    from flows.services import use_running_services

    use_running_services()
    run_here(config, overrides or [])


@app.command()
@told
def retrain(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what it would decide; the champion stays, and the round is left open.")] = False,
) -> None:
    """Train on new prompts, from the champion on.

    CONFIG has a section 'retrain'. The new drafter becomes the champion if it is lossless and better by the margin and by more than chance; says
    why, or why not.
    """
    from flows.here import retrain_here
    from flows.services import use_running_services

    use_running_services()
    outcome = retrain_here(config, overrides or [], dry_run=dry_run)
    for line in (*outcome.get("reasons", ()), outcome["summary"]):
        print(line)


@app.command()
@told
def plan(config: ConfigPath, overrides: Overrides = None) -> None:
    """Show what would run and what it takes, without doing it.

    Which stages are cached and why others are not; disk, memory and time of what is left. Of a retraining: of the round that it would take up.
    """
    from flows.plan import show_plan

    show_plan(config, overrides or [])


@app.command()
@told
def validate(config: ConfigPath, overrides: Overrides = None) -> None:
    """Check a configuration file.

    Rules that need files, devices, the target or the data are checked by 'plan'.
    """
    from dflash_core.retrain.config import load_any_config

    loaded = load_any_config(config, overrides or [])
    print(f"{config}: valid (run '{loaded.run.name}', target {loaded.target.model}, digest {loaded.digest[:12]})")


@app.command()
@told
def prompts(
    config: ConfigPath, out: Annotated[Path, typer.Argument(help="The file to write: .jsonl or .jsonl.gz.")], overrides: Overrides = None
) -> None:
    """Write all prompts of CONFIG into one file.

    For a machine that cannot reach their sources: it is a source itself there, in data.sources. Mixed, so that any limit takes a fair part.
    """
    from flows.write_prompts import write

    write(config, overrides or [], out)


@app.command()
@told
def evaluate(
    config: ConfigPath,
    overrides: Overrides = None,
    drafter: Annotated[
        str | None, typer.Option(help="A folder, 'champion', or the number of a registered version. Default: what CONFIG has trained.")
    ] = None,
    server: Annotated[str | None, typer.Option(metavar="URL", help="Measure a running vLLM or SGLang that drafts.")] = None,
    alone: Annotated[str | None, typer.Option(metavar="URL", help="The same server without the drafter, to compare with.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight together at a server.")] = 1,
) -> None:
    """Measure a drafter on the held-out prompts of CONFIG.

    Losslessness, acceptance and speed, beside the target alone.
    """
    if server is not None or alone is not None:
        from flows.evaluate_server import evaluate_server

        print(evaluate_server(config, overrides or [], server, alone, concurrency, drafter))
        return
    from flows.one_stage import evaluate as evaluate_here

    print(evaluate_here(config, overrides or [], drafter) / "evaluation.json")


@app.command()
@told
def compare(
    first: Annotated[str, typer.Argument(help="An evaluation's folder; with --config a drafter: a folder, 'champion', a version's number.")],
    second: Annotated[str, typer.Argument(help="The same for the drafter that it is compared with.")],
    config: Annotated[Path | None, typer.Option(metavar="CONFIG", help="Measure drafters on the prompts of this configuration first.")] = None,
    overrides: Overrides = None,
    to: Annotated[Path | None, typer.Option(help="Write comparison.json and comparison.png into this folder.")] = None,
) -> None:
    """Compare two drafters prompt by prompt.

    Difference in acceptance length on the same prompts, set by set, with its 95 % interval and a paired test.
    """
    from flows.compare_drafters import compare_drafters

    compare_drafters(first, second, config, overrides or [], to)


@app.command()
@told
def export(
    config: ConfigPath,
    overrides: Overrides = None,
    to: Annotated[Path | None, typer.Option(help="Copy the folder there. Default: it stays in the workspace.")] = None,
) -> None:
    """Write the folder that servers load, and print its path.

    vLLM, SGLang and Transformers load it as it is. It is checked against the trained drafter.
    """
    from flows.one_stage import export as export_here

    print(export_here(config, overrides or [], to))


@app.command("import")
@told
def import_(
    source: Annotated[Path, typer.Argument(help="A drafter of z-lab, SpecForge (exported to hf) or speculators.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; must not be there.")],
    target: Annotated[str | None, typer.Option(help="The target to go on with, as in target.model; the drafter is held against it.")] = None,
) -> None:
    """Bring in a drafter that others have trained, to train it further.

    Every tensor is checked. Prints the settings that a configuration needs to begin with it.
    """
    from flows.import_drafter import bring_in

    bring_in(source, out, target)


@app.command()
@told
def up(folder: ServicesFolder = SERVICES) -> None:
    """Start Prefect, MLflow and a worker on this machine.

    Returns once all of them answer. If one does not start, or this is interrupted, everything that was started is stopped.
    """
    from flows.services import show
    from flows.services import up as start

    show(folder, start(folder))


@app.command()
@told
def down(folder: ServicesFolder = SERVICES) -> None:
    """Stop what 'up' has started.

    A flow run that goes on saves its work and ends; submitted again, it goes on from there.
    """
    from flows.services import down as stop

    print(f"{counted(stop(folder), 'process', 'processes')} ended")


@app.command()
@told
def status(folder: ServicesFolder = SERVICES) -> None:
    """Say which services run, where, and how to use them.

    Exit status 1 if not all of them answer.
    """
    from flows.services import services, show

    if not show(folder, services(folder)):
        raise typer.Exit(1)


@app.command()
@told
def deploy() -> None:
    """Deploy all of prefect.yaml; may be repeated.

    The parameters of each deployment are first brought up to date with the configuration that it names.
    """
    from flows.deploy import deploy as deploy_all
    from flows.services import use_running_services

    use_running_services()
    deploy_all()


@app.command()
@told
def submit(
    config: ConfigPath,
    overrides: Overrides = None,
    deployment: Annotated[str, typer.Option(help="Flow and name of the deployment.")] = "train-drafter/demo",
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run; exit status 1 if it does not complete.")] = False,
) -> None:
    """Check a configuration and have a worker run it."""
    from flows.deploy import submit as send
    from flows.services import use_running_services

    use_running_services()
    send(config, overrides or [], deployment, watch)


@config_app.command()
@told
def annotate(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print the whole configuration as YAML, every key with its meaning, type and default."""
    from dflash_core.config import annotated_yaml
    from dflash_core.retrain.config import load_any_config

    print(annotated_yaml(load_any_config(config, overrides or [])), end="")


@shards_app.command()
@told
def verify(path: Annotated[Path, typer.Argument(help="Folder of a hidden-state dataset (it has a card.json).")]) -> None:
    """Read every byte of a hidden-state dataset and list what is wrong with it."""
    from dflash_core.shards import ShardDataset, verify_shards

    problems = verify_shards(path)
    if problems:
        raise DFlashError("\n".join([f"{path}: {counted(len(problems), 'problem')}", *(f"  {problem}" for problem in problems)]))
    dataset = ShardDataset(path)
    print(f"{path}: {counted(len(dataset), 'sample')}, {counted(int(dataset.lengths.sum()), 'token')}, every byte as it was written")


@app.command()
@told
def doctor() -> None:
    """Say what this machine has.

    Torch, devices, compilation, Triton, memory and disk.
    """
    from flows.doctor import examine

    if not examine():
        raise typer.Exit(1)


def main() -> None:
    """The entry point of ``dflashctl``."""
    app(prog_name="dflashctl")


if __name__ == "__main__":
    main()
