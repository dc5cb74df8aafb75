"""A drafter judged the way it will be used: real draft–verify decoding of held-out prompts, beside the target alone.

    result = evaluate_drafter(config, target, drafter, heldout, folder, untrained=drafter_before_training)

Every prompt is decoded by the target alone and then with the drafter, one after the other, so that whatever slows the machine down slows
both; both are the same loop with the same caches. The first prompts are also decoded with the drafter as it was before training: what training added.
One short answer of each kind is thrown away before the first measurement.
"""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path

import torch

from dflash_core.config import PipelineConfig, digest_of
from dflash_core.data import SampleTable
from dflash_core.decoding import Generation, autoregressive_generate, speculative_generate
from dflash_core.drafter import DFlashDrafter
from dflash_core.errors import DataError, Problem
from dflash_core.evaluation.lossless import find_divergence
from dflash_core.evaluation.records import PromptRecord, append_record, read_records
from dflash_core.evaluation.result import EvaluationResult, figures, prompt_figures
from dflash_core.stages import Progress, no_progress, write_json_atomic
from dflash_core.target import TargetModel

RECORDS = "prompts.jsonl"
RESULT = "evaluation.json"


def evaluate_drafter(
    config: PipelineConfig,
    target: TargetModel,
    drafter: DFlashDrafter,
    heldout: SampleTable,
    folder: Path,
    *,
    untrained: DFlashDrafter | None = None,
    progress: Progress = no_progress,
) -> EvaluationResult:
    """Decode the first ``evaluation.num_prompts`` held-out prompts greedily and sum up.

    Writes ``prompts.jsonl`` (a line per finished prompt, at once) and ``evaluation.json`` into ``folder``. Called again after a kill, it
    measures only the prompts that are missing.

    Args:
        target: decodes in its own precision on its own device; copies of the drafters follow it.
        untrained: a drafter as it was before training, decoded on the first ``evaluation.untrained_prompts`` prompts.

    Raises:
        DataError: there is no held-out prompt.
        InputError: ``evaluation.block_size`` is not one that the drafter can draft, or a prompt leaves no room in the target's positions.
    """
    settings = config.evaluation
    if len(heldout) == 0:
        remedy = "Raise data.heldout_fraction or give more prompts"
        raise DataError("evaluation", [Problem("data.heldout_fraction", config.data.heldout_fraction, "left no prompt to evaluate on", remedy)])
    folder.mkdir(parents=True, exist_ok=True)
    bench = _Bench(target, drafter, untrained, settings.block_size or drafter.config.block_size, settings.max_new_tokens, heldout.digest)
    path = folder / RECORDS
    records = {record.id: record for record in read_records(path, bench.key)}
    indices = range(min(settings.num_prompts, len(heldout)))
    missing = [
        index
        for index in indices
        if not _covers(records.get(heldout.id(index)), wants_untrained=bench.compares and index < settings.untrained_prompts)
    ]
    if missing:
        bench.warm_up(heldout.prompt_tokens(missing[0]).tolist())
    for done, index in enumerate(missing, start=len(indices) - len(missing)):
        progress(done, len(indices), "prompts")
        record = bench.measure(heldout.id(index), heldout.prompt_tokens(index).tolist(), with_untrained=index < settings.untrained_prompts)
        append_record(path, record)
        records[record.id] = record
    progress(len(indices), len(indices), "prompts")
    result = bench.sum_up([records[heldout.id(index)] for index in indices])
    write_json_atomic(folder / RESULT, result.model_dump(mode="json"))
    return result


class _Bench:
    """The target and the drafters, ready to answer prompts and to sum up what they took."""

    def __init__(
        self, target: TargetModel, drafter: DFlashDrafter, untrained: DFlashDrafter | None, block_size: int, max_new_tokens: int, prompts_digest: str
    ):
        self._target = target
        self._drafter = _decoding_copy(drafter, target)
        self._untrained = _decoding_copy(untrained, target) if untrained is not None else None
        self._block_size, self._max_new_tokens = block_size, max_new_tokens
        self._drafter_digest = weights_digest(self._drafter)
        untrained_digest = weights_digest(self._untrained) if self._untrained is not None else None
        measured = [target.info.digest, self._drafter_digest, untrained_digest, prompts_digest, block_size, max_new_tokens]
        self.key = digest_of([*measured, str(target.dtype), str(target.device)])
        self.compares = untrained is not None

    def warm_up(self, prompt_ids: list[int]) -> None:
        """First calls allocate and choose kernels; their time is nobody's."""
        self._alone(prompt_ids, 4)
        self._drafted(self._drafter, prompt_ids, 2 * self._block_size)

    def measure(self, name: str, prompt_ids: list[int], *, with_untrained: bool) -> PromptRecord:
        """Answer one prompt in every way, one after the other."""
        baseline = self._alone(prompt_ids, self._max_new_tokens)
        trained = self._drafted(self._drafter, prompt_ids, self._max_new_tokens)
        untrained = self._drafted(self._untrained, prompt_ids, self._max_new_tokens) if with_untrained and self._untrained is not None else None
        divergence = find_divergence(self._target, prompt_ids, baseline.tokens, trained.tokens, self._block_size)
        exact = self._target.dtype == torch.float32
        return PromptRecord(
            key=self.key,
            id=name,
            prompt_tokens=len(prompt_ids),
            baseline=baseline,
            trained=trained,
            untrained=untrained,
            divergence=divergence,
            lossless=divergence is None or not (exact or divergence.beyond_noise),
        )

    def sum_up(self, records: list[PromptRecord]) -> EvaluationResult:
        """The figures of all records."""
        target, block_size = self._target, self._block_size
        compared = [(record.untrained, record.baseline) for record in records if record.untrained is not None]
        return EvaluationResult(
            target=target.info.name,
            target_digest=target.info.digest,
            drafter_digest=self._drafter_digest,
            dtype=str(target.dtype).removeprefix("torch."),
            device=str(target.device),
            threads=torch.get_num_threads(),
            block_size=block_size,
            max_new_tokens=self._max_new_tokens,
            temperature=0.0,
            prompts=len(records),
            lossless=sum(record.lossless for record in records) / len(records),
            diverged=sum(record.divergence is not None for record in records),
            diverged_beyond_noise=sum(record.divergence is not None and record.divergence.beyond_noise for record in records),
            trained=figures([record.trained for record in records], [record.baseline for record in records], block_size),
            untrained=figures([drafted for drafted, _ in compared], [baseline for _, baseline in compared], block_size) if compared else None,
            rows=tuple(prompt_figures(record, block_size) for record in records),
        )

    def _alone(self, prompt_ids: list[int], max_new_tokens: int) -> Generation:
        return autoregressive_generate(self._target, prompt_ids, max_new_tokens=max_new_tokens, stop_ids=self._target.info.eos_token_ids)

    def _drafted(self, drafter: DFlashDrafter, prompt_ids: list[int], max_new_tokens: int) -> Generation:
        return speculative_generate(
            self._target,
            drafter,
            prompt_ids,
            max_new_tokens=max_new_tokens,
            block_size=self._block_size,
            stop_ids=self._target.info.eos_token_ids,
        )


def _decoding_copy(drafter: DFlashDrafter, target: TargetModel) -> DFlashDrafter:
    return copy.deepcopy(drafter).to(target.device, target.dtype).eval()  # a drafter that is being trained stays as it is


def _covers(record: PromptRecord | None, *, wants_untrained: bool) -> bool:
    return record is not None and (record.untrained is not None or not wants_untrained)


def weights_digest(drafter: DFlashDrafter) -> str:
    """sha256 (hex) over the names, types and bytes of a drafter's weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
