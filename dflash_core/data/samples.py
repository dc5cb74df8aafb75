"""The tokenised data set: ``train.parquet`` and ``heldout.parquet``, each with a digest of its content.

Columns: ``id`` text, ``tokens`` list<int32>, ``loss_mask`` list<bool>, ``prompt_length`` int32 (tokens before the first
supervised one). Which side a conversation is on depends on its ``group`` or its first user message and on nothing else, so
it stays there when data is added, and two conversations that begin alike are never divided.

    table = SampleTable.open(folder / "train.parquet")
    table.tokens(0), table.loss_mask(0)
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_core.config import PipelineConfig, digest_of
from dflash_core.data.driver import Answered
from dflash_core.data.rejects import RejectLog
from dflash_core.data.render import check_tokenizer, render_sample, splice_turns
from dflash_core.data.responses import normalised, read_responses
from dflash_core.data.sets import KeptOut, refuse_overlap
from dflash_core.data.types import Conversation, Sample
from dflash_core.errors import DataError, Problem
from dflash_core.stages import Progress, atomic_write, no_progress, write_json_atomic
from dflash_core.words import counted

SCHEMA = pa.schema(
    [("id", pa.string()), ("tokens", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_())), ("prompt_length", pa.int32())],
)
_DIGEST = "dflash.digest"
_ROW_GROUP = 1024
SIDES = ("train", "heldout")


def write_samples(
    config: PipelineConfig,
    tokenizer: Any,
    responses_folder: Path,
    out_folder: Path,
    *,
    tokenizer_digest: str,
    template_digest: str | None,
    progress: Progress = no_progress,
) -> dict[str, int]:
    """Tokenise the conversations of ``responses_folder`` into ``train.parquet``, ``heldout.parquet``, ``card.json`` and ``rejected.jsonl``.

    Args:
        tokenizer_digest, template_digest: of the target, for the card.

    Returns:
        counts: conversations, rejected, reach_max_length (samples of the full ``data.max_length``, mostly cut off there), and for each side
        (train, heldout) the samples, ``<side>_tokens`` and ``<side>_supervised`` tokens. With ``evaluation.sets`` also in_evaluation_sets:
        conversations that say a prompt of theirs and are not trained on.

    Raises:
        DataError: too many conversations are rejected, or a side is empty, or ``data.evaluation_overlap`` refuses what is in a set.
    """
    check_tokenizer(tokenizer)
    out_folder.mkdir(parents=True, exist_ok=True)
    reach_max_length = 0
    with contextlib.ExitStack() as stack:
        rejected = stack.enter_context(RejectLog(out_folder / "rejected.jsonl"))
        kept_out = KeptOut.of(config, out_folder / "rejected-of-sets.jsonl") if config.evaluation.sets else None
        overlapping: list[tuple[str, str]] = []
        writers = {side: stack.enter_context(_SampleWriter(out_folder / f"{side}.parquet")) for side in SIDES}
        for answered in read_responses(responses_folder):
            rejected.seen += 1
            try:
                samples = _samples_of(config, tokenizer, answered)
            except DataError as error:
                rejected.add(error.problems[0])
                continue
            heldout = is_heldout(answered.conversation, config.data.heldout_fraction)
            if kept_out is not None and not heldout and (name := kept_out.found_in(answered.conversation)) is not None:
                overlapping.append((answered.conversation.id, name))
                rejected.leave_out(
                    Problem(answered.conversation.id, name, "says a prompt of an evaluation set", "None is needed: it is not trained on")
                )
                continue
            writer = writers["heldout" if heldout else "train"]
            for sample in samples:
                writer.add(sample)
                reach_max_length += len(sample.tokens) == config.data.max_length
            progress(rejected.seen, 0, "conversations")
        progress(rejected.seen, rejected.seen, "conversations")  # how many there are is known at the end only
        rejected.check(config.data.max_rejected_fraction)
        if config.data.evaluation_overlap == "refuse":
            refuse_overlap(overlapping)
        for side, writer in writers.items():
            if writer.rows == 0:
                raise _empty_side(side, rejected.seen, config.data.heldout_fraction)
    counts = {"conversations": rejected.seen, "rejected": rejected.count, "reach_max_length": reach_max_length}
    for side, writer in writers.items():
        counts |= {side: writer.rows, f"{side}_tokens": writer.tokens, f"{side}_supervised": writer.supervised}
    if kept_out is not None:
        counts["in_evaluation_sets"] = len(overlapping)
    digests = {f"{side}_digest": writer.digest for side, writer in writers.items()}
    card = {"digest": digest_of(digests), **digests, "tokenizer_digest": tokenizer_digest, "template_digest": template_digest}
    write_json_atomic(out_folder / "card.json", {**card, "template_arguments": config.data.template_arguments, "counts": counts})
    return counts


def is_heldout(conversation: Conversation, fraction: float) -> bool:
    """Whether a conversation is held out: a hash of its group, or else of its first user message, is below ``fraction``."""
    first = next((message.content for message in conversation.messages if message.role == "user"), "")
    key = f"group {conversation.group}" if conversation.group is not None else f"prompt {normalised(first).casefold()}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < fraction * 2**64


def _samples_of(config: PipelineConfig, tokenizer: Any, answered: Answered) -> Sequence[Sample]:
    data, conversation = config.data, answered.conversation
    samples: Sequence[Sample]
    if answered.responses is None:
        arguments = data.template_arguments
        samples = [render_sample(tokenizer, conversation.messages, template_arguments=arguments, max_length=data.max_length, id=conversation.id)]
    else:
        samples = splice_turns(tokenizer, conversation, answered.responses, template_arguments=data.template_arguments, max_length=data.max_length)
    long_enough = [sample for sample in samples if sum(sample.loss_mask) >= data.min_response_tokens]
    if not long_enough:
        most = max(sum(sample.loss_mask) for sample in samples)
        message = f"has {most} supervised tokens, fewer than data.min_response_tokens = {data.min_response_tokens}"
        raise DataError(conversation.id, [Problem(conversation.id, most, message, "Lower data.min_response_tokens or leave the conversation out")])
    return long_enough


def _empty_side(side: str, conversations: int, fraction: float) -> DataError:
    message = f"of {counted(conversations, 'conversation')} none is in the {'held-out' if side == 'heldout' else 'training'} part"
    remedy = "Give more prompts or change it; conversations of one group, or with the same first user message, stay on one side"
    return DataError("data", [Problem("data.heldout_fraction", fraction, message, remedy)])


class _SampleWriter:
    """Writes one side; the file appears, whole, when the block ends without an error."""

    def __init__(self, path: Path):
        self._path = path
        self.rows = self.tokens = self.supervised = 0
        self.digest = ""
        self._hash = hashlib.sha256()
        self._pending: list[Sample] = []

    def __enter__(self) -> _SampleWriter:
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(atomic_write(self._path))
            self._file = stack.enter_context(pq.ParquetWriter(temporary, SCHEMA, compression="zstd"))
            stack.push(self._finish)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def add(self, sample: Sample) -> None:
        tokens, mask = np.asarray(sample.tokens, dtype=np.int32), np.asarray(sample.loss_mask, dtype=np.bool_)
        _update(self._hash, sample.id, tokens, mask, sample.prompt_length)
        self.rows += 1
        self.tokens += len(tokens)
        self.supervised += int(mask.sum())
        self._pending.append(sample)
        if len(self._pending) == _ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            columns: Mapping[str, list[Any]] = {name: [getattr(sample, name) for sample in self._pending] for name in SCHEMA.names}
            self._file.write_table(pa.table(columns, schema=SCHEMA))
        self._pending = []

    def _finish(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._flush()
            self.digest = self._hash.hexdigest()
            self._file.add_key_value_metadata({_DIGEST: self.digest})


def _update(digest: hashlib._Hash, id: str, tokens: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_], prompt_length: int) -> None:
    name = id.encode()
    digest.update(np.array([len(name), len(tokens), prompt_length], dtype="<i8").tobytes() + name)
    digest.update(tokens.astype("<i4", copy=False).tobytes() + np.packbits(mask).tobytes())


class SampleTable:
    """One side of the data set, in memory as Arrow; samples are views of it, without a copy.

    lengths: tokens of each sample, int64 [samples]
    digest:  sha256 (hex) over all ids, tokens, masks and prompt lengths, in order
    """

    def __init__(self, table: pa.Table, digest: str):
        self._ids = table["id"].combine_chunks()
        tokens = table["tokens"].cast(pa.large_list(pa.int32())).combine_chunks()  # 64-bit offsets: more than 2**31 tokens fit
        mask = table["loss_mask"].cast(pa.large_list(pa.bool_())).combine_chunks()
        self._starts: npt.NDArray[np.int64] = tokens.offsets.to_numpy()
        self._tokens: npt.NDArray[np.int32] = tokens.values.to_numpy()
        self._mask: npt.NDArray[np.bool_] = mask.values.to_numpy(zero_copy_only=False)
        self._prompt_lengths: npt.NDArray[np.int32] = table["prompt_length"].to_numpy()
        self.lengths: npt.NDArray[np.int64] = np.diff(self._starts)
        self.digest = digest

    @classmethod
    def open(cls, path: Path) -> SampleTable:
        """Read a Parquet file that ``write_samples`` wrote and check it against its digest.

        Raises:
            DataError: the file is missing, is not such a file, or its content has changed.
        """
        try:
            table = pq.read_table(path, columns=SCHEMA.names)
            recorded = (pq.read_metadata(path).metadata or {}).get(_DIGEST.encode(), b"").decode()
            samples = cls(table, recorded)
        except (OSError, pa.ArrowException, KeyError, ValueError) as error:
            raise _damaged(path, f"is not a readable table of samples: {str(error).partition(chr(10))[0]}") from error
        if (found := samples._content_digest()) != recorded:
            raise _damaged(path, f"has digest {found}, but {recorded or 'none'} was written")
        return samples

    def __len__(self) -> int:
        return len(self.lengths)

    def id(self, index: int) -> str:
        """Id of a sample, unique in the table."""
        return str(self._ids[index].as_py())

    def tokens(self, index: int) -> npt.NDArray[np.int32]:
        """Token ids, int32 [T]."""
        return self._tokens[self._starts[index] : self._starts[index + 1]]

    def loss_mask(self, index: int) -> npt.NDArray[np.bool_]:
        """True where the target produced the token, bool [T]."""
        return self._mask[self._starts[index] : self._starts[index + 1]]

    def prompt_tokens(self, index: int) -> npt.NDArray[np.int32]:
        """Token ids before the first supervised one, int32 [prompt length]: what the target is given at evaluation."""
        return self.tokens(index)[: int(self._prompt_lengths[index])]

    def _content_digest(self) -> str:
        digest = hashlib.sha256()
        for index in range(len(self)):
            _update(digest, self.id(index), self.tokens(index), self.loss_mask(index), int(self._prompt_lengths[index]))
        return digest.hexdigest()


def _damaged(path: Path, message: str) -> DataError:
    return DataError(str(path), [Problem(path.name, str(path), message, f"Delete the folder {path.parent} and run the stage 'samples' again")])
