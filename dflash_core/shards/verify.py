"""Look at every byte of a dataset of hidden states and list what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dflash_core.errors import ShardError
from dflash_core.shards.format import INDEX, TOKENS, ShardCard, index_part, is_whole, read_index, shard_name
from dflash_core.shards.reader import ShardDataset, index_damaged
from dflash_core.stages import Progress, is_busy, no_progress
from dflash_core.words import counted


def verify_shards(folder: Path, progress: Progress = no_progress) -> list[str]:
    """Every problem of a dataset, as a sentence that names the file and what to do; an empty list means that it is whole.

    Finds missing, truncated and altered files down to one bit, index rows that do not fit the shards, and unfinished datasets.
    Damage of one sample does not hide that of another.
    """
    try:
        card = ShardCard.read(folder)
        if unfinished := _unfinished(folder, card):
            return [unfinished]
        dataset = ShardDataset(folder)
    except ShardError as error:
        return [str(error)]
    if problems := _index_problems(dataset, card):
        return problems
    total, done = int(dataset.lengths.sum()), 0
    found: dict[str, None] = {}  # in order, without repetition: a missing file is one problem, not one for each of its samples
    for index in range(len(dataset)):
        try:
            sample = dataset.sample(index)
            supervised = int(sample.loss_mask.sum())
            if supervised != dataset.supervised[index]:
                found[
                    f"{folder / INDEX}: sample {sample.id!r} has {supervised} supervised tokens, not {dataset.supervised[index]}. Extract it again."
                ] = None
        except ShardError as error:
            found[str(error)] = None
        done += int(dataset.lengths[index])
        progress(done, total, "tokens")
    return list(found)


def _unfinished(folder: Path, card: ShardCard) -> str | None:
    """How far a dataset is that has no index yet."""
    if (folder / INDEX).exists():
        return None
    finished = sum(is_whole(folder, card, shard) for shard in range(card.num_shards))
    remedy = (
        "It is being made at present: wait for that to end" if is_busy(folder) else "Nobody is at it: run the extraction again, it goes on from there"
    )
    return f"{folder} is not finished: {finished} of {counted(card.num_shards, 'shard')} are whole, and it has no {INDEX}. {remedy}."


def _is_readable(dataset: ShardDataset, members: range) -> bool:
    try:
        for index in members:
            dataset.sample(index)
    except ShardError:
        return False
    return True


def _index_problems(dataset: ShardDataset, card: ShardCard) -> list[str]:
    """The rows must be those of the shards' own index parts, and lie one after the other."""
    whole = read_index(dataset.folder / INDEX, card)
    problems = []
    for shard in range(card.num_shards):
        members = card.samples_of(shard)
        rows = whole.slice(members.start, len(members))
        path = index_part(dataset.folder, shard)
        in_line = (rows["sample"].to_pylist(), rows["shard"].to_pylist()) == (list(members), [shard] * len(members)) and all(
            rows[start].to_pylist() == np.cumsum([0, *rows[count].to_numpy()])[:-1].tolist()
            for start, count in (("start", TOKENS), *((f"{name}_start", name) for name in card.partial))
        )
        try:
            same = read_index(path, card).equals(rows)
            if not same and not _is_readable(dataset, members):
                problems.append(index_damaged(dataset.folder / INDEX, path))
            elif not in_line or not same:
                problems.append(
                    f"{path} and {INDEX} do not tell the same of {shard_name(shard)}. "
                    f"Delete {path} and run the extraction again: only this shard is made anew."
                )
        except FileNotFoundError:
            problems.append(f"{path} is missing. Run the extraction again: only {shard_name(shard)} is made anew.")
        except ShardError as error:
            problems.append(str(error))
    return problems
