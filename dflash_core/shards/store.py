"""Finished datasets of hidden states in a store that machines share: any address that fsspec knows, such as ``s3://bucket/shards``.

    push(folder, "s3://bucket/shards/one")        # what is there already is not sent again
    pull("s3://bucket/shards/one", elsewhere)     # likewise; each sample is checked when it is first read

The files are those of the folder. ``index.arrow`` goes last either way: where it is, the dataset is whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic import ValidationError

from dflash_core.disk import FULL, clear_disk_errors, full_disk
from dflash_core.errors import ShardError
from dflash_core.shards.format import CARD, INDEX, ShardCard, index_part, is_whole, shard_name
from dflash_core.stages import Progress, atomic_write, no_progress

SHARDS_KEPT = "Finished shards are kept: free some space and run the extraction again."
_AT_ONCE = 8  # files on their way together: a single connection to an object store does not fill a network


def holds(address: str) -> bool:
    """Whether a finished dataset is there. Raises ``ShardError`` if the store cannot be reached."""
    with clear_errors(address):
        files, path = open_store(address)
        return bool(files.exists(f"{path}/{INDEX}"))


def push(folder: Path, address: str, progress: Progress = no_progress) -> None:
    """Copy a finished dataset to a store.

    Raises:
        ShardError: the store cannot be reached or refuses; what has arrived stays, and the next push goes on from there.
    """
    names = _names(ShardCard.read(folder))
    with clear_errors(address):
        files, path = open_store(address)
        files.makedirs(f"{path}/{Path(names[-1]).parent}", exist_ok=True)
        there = _sizes(files, path)

        def send(name: str) -> None:
            if there.get(name) != (folder / name).stat().st_size:
                put(files, folder / name, f"{path}/{name}")

        _each(send, names, progress)
        for name in (CARD, INDEX):
            put(files, folder / name, f"{path}/{name}")
        files.invalidate_cache()


def pull(address: str, folder: Path, progress: Progress = no_progress) -> None:
    """Copy a finished dataset from a store. Files that are there, of the right size, stay.

    Raises:
        ShardError: there is none, files of it are missing or truncated, or the store cannot be reached; what has arrived stays.
    """
    with clear_errors(address):
        files, path = open_store(address)
        there = _sizes(files, path)
        if INDEX not in there:
            raise ShardError(f"{address} holds no finished dataset of hidden states: it has no {INDEX}. Push one, or correct the address.")
        try:
            card = ShardCard.model_validate_json(files.cat_file(f"{path}/{CARD}"))
        except (FileNotFoundError, ValidationError) as error:
            raise _damaged(address, f"{CARD} is missing, damaged or of another format") from error
        pull_shards(address, card, folder, progress)
        for name in (CARD, INDEX):
            _fetch(files, path, name, there, folder)


def pull_shards(address: str, card: ShardCard, folder: Path, progress: Progress = no_progress) -> None:
    """``pull``, but the shards and their index rows alone: also of a dataset that nobody has finished yet.

    Raises:
        ShardError: as ``pull``.
    """
    with clear_errors(address):
        files, path = open_store(address)
        there = _sizes(files, path)
        if lacking := [name for name in _names(card) if name not in there]:
            raise _damaged(address, f"{len(lacking)} files are missing, the first is {lacking[0]}")
        _each(lambda name: _fetch(files, path, name, there, folder), _names(card), progress)
        if broken := [shard for shard in range(card.num_shards) if not is_whole(folder, card, shard)]:
            raise _damaged(address, f"{shard_name(broken[0])} was truncated or overwritten")


def _fetch(files: Any, path: str, name: str, there: Mapping[str, int], folder: Path) -> None:
    """Copy a file from the store, unless it is here and of the same size."""
    here = folder / name
    if not here.is_file() or here.stat().st_size != there.get(name):
        with clear_disk_errors(folder, there.get(name, 0), SHARDS_KEPT, ShardError), atomic_write(here) as temporary:
            files.get_file(f"{path}/{name}", str(temporary))


def put(files: Any, source: Path, there: str) -> None:
    """Copy a file to ``there`` in a store, where it appears whole or not at all. Object stores see to that; in a folder it has another name first."""
    if not isinstance(files, LocalFileSystem):
        files.put_file(str(source), there)
        return
    with clear_disk_errors(Path(there).parent, source.stat().st_size, SHARDS_KEPT, ShardError), atomic_write(Path(there)) as temporary:
        files.put_file(str(source), str(temporary))


def sweep(files: Any, there: str) -> None:
    """Take away what a killed process left of a file that none but this one writes."""
    if isinstance(files, LocalFileSystem):
        for leftover in Path(there).parent.glob(f".{Path(there).name}.*.tmp"):
            leftover.unlink(missing_ok=True)


def put_beside(path: Path, address: str) -> str:
    """Copy one file to a store, unless it is there and of the same size. Returns the address."""
    with clear_errors(address):
        files, there = open_store(address)
        files.makedirs(there.rpartition("/")[0], exist_ok=True)
        if not files.exists(there) or files.size(there) != path.stat().st_size:
            put(files, path, there)
    return address


def fetch_file(address: str, path: Path) -> None:
    """Copy one file from a store. Raises ``ShardError`` where there is none, or the store cannot be used."""
    with clear_errors(address):
        files, there = open_store(address)
        with clear_disk_errors(path.parent, 0, SHARDS_KEPT, ShardError):
            files.get_file(there, str(path))


def _damaged(address: str, how: str) -> ShardError:
    return ShardError(f"{address} is damaged: {how}. Delete it there, and the next run makes and puts it there anew.")


def _names(card: ShardCard) -> list[str]:
    """Files of a dataset within its folder, but for card and index."""
    shards = range(card.num_shards)
    return [shard_name(shard) for shard in shards] + [index_part(Path(), shard).as_posix() for shard in shards]


def _each(work: Callable[[str], None], names: Sequence[str], progress: Progress) -> None:
    with ThreadPoolExecutor(_AT_ONCE, "store") as threads:
        futures = [threads.submit(work, name) for name in names]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                progress(done, len(names), "files")
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def open_store(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    files, path = fsspec.core.url_to_fs(address)
    return files, str(path).rstrip("/")


def _sizes(files: Any, path: str) -> dict[str, int]:
    files.invalidate_cache()  # others write there
    found = files.find(path, detail=True) if files.exists(path) else {}
    return {name.removeprefix(f"{path}/"): item["size"] for name, item in found.items()}


@contextlib.contextmanager
def clear_errors(address: str) -> Iterator[None]:
    """What goes wrong with a store becomes a ``ShardError`` that names it."""
    try:
        yield
    except ShardError:
        raise
    except ImportError as error:
        raise ShardError(f"{address}: {error}. For Amazon's and compatible stores: pip install 'dflash-pipeline[s3]'.") from error
    except Exception as error:  # every kind of store has errors of its own
        if isinstance(error, OSError) and error.errno in FULL:
            raise ShardError(full_disk(address, error, "nothing more fits", SHARDS_KEPT)) from error
        message = f"{type(error).__name__}: {error}"
        raise ShardError(
            f"{address} cannot be used: {message}. Check address, credentials and network (extraction.store), and start again."
        ) from error
