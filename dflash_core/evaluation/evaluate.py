"""A drafter judged the way it will be used: real draft–verify decoding of held-out prompts and of sets, beside the target alone.

    served = measure_served(config, target_in_bfloat16, drafter, prompts, folder)
    result = evaluate_drafter(config, target, drafter, prompts, folder, untrained=drafter_before_training, served=served)

Every prompt is decoded by the target alone and then with the drafter, one after the other, so that whatever slows the machine down slows
both; both are the same loop with the same caches. The first prompts of each set are also decoded with the drafter as it was before training: what
training added.
One short answer of each kind is thrown away before the first measurement.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from dflash_core.config import PipelineConfig, digest_of
from dflash_core.config_rules import block_size_problems
from dflash_core.decoding import Decoder, Generation, Room, open_decoder, open_verifier
from dflash_core.drafter import DFlashDrafter
from dflash_core.errors import DataError, InputError, Problem
from dflash_core.evaluation.fit import fits
from dflash_core.evaluation.lossless import find_divergence
from dflash_core.evaluation.prompts import EvaluationPrompt
from dflash_core.evaluation.records import PromptRecord, append_record, read_records
from dflash_core.evaluation.result import EvaluationResult, InPrecision, in_precision
from dflash_core.evaluation.ways import further_ways, measure_ways, require_room_of_ways
from dflash_core.stages import Progress, no_progress, write_json_atomic
from dflash_core.target import TargetModel

RECORDS = "prompts.jsonl"
RESULT = "evaluation.json"


def evaluate_drafter(
    config: PipelineConfig,
    target: TargetModel,
    drafter: DFlashDrafter,
    prompts: Sequence[EvaluationPrompt],
    folder: Path,
    *,
    untrained: DFlashDrafter | None = None,
    served: InPrecision | None = None,
    progress: Progress = no_progress,
) -> EvaluationResult:
    """Decode prompts greedily and sum up, set by set and over all; then in the further ways that the settings ask for (``ways.py``).

    Writes ``prompts.jsonl`` (a line per finished prompt, at once) and ``evaluation.json`` into ``folder``. Called again after a kill, it
    measures only the prompts that are missing.

    Args:
        target: decodes in its own precision on its own device; copies of the drafters follow it.
        untrained: a drafter as it was before training, decoded on the first ``evaluation.untrained_prompts`` prompts of each set.
        served: what ``measure_served`` has found of the drafter, with the further ways, which are then not measured here.

    Raises:
        DataError: there is no prompt.
        InputError: ``evaluation.block_size`` or one of ``block_sizes`` is not one that the drafter can draft, a prompt leaves no room in the
            target's positions, or so many requests do not fit into the memory of the target's device.
    """
    bench = _Bench(config, target, drafter, prompts, untrained=untrained, with_ways=served is None)
    found = bench.decode(folder, progress, "prompts")
    result = EvaluationResult(
        target=target.info.name,
        target_digest=target.info.digest,
        drafter_digest=bench.drafter_digest,
        prompts_digest=bench.prompts_digest,
        device=str(target.device),
        threads=torch.get_num_threads(),
        block_size=bench.room.block_size,
        max_new_tokens=bench.room.max_new_tokens,
        temperature=0.0,
        **dict(found),
        served=served,
    )
    write_json_atomic(folder / RESULT, result.model_dump(mode="json"))
    return result


def measure_served(
    config: PipelineConfig,
    target: TargetModel,
    drafter: DFlashDrafter,
    prompts: Sequence[EvaluationPrompt],
    folder: Path,
    *,
    progress: Progress = no_progress,
) -> InPrecision:
    """Decode the first ``evaluation.served_prompts`` prompts of each set in the precision of serving: how fast is it there, and what is accepted?

    Args, errors and resuming are those of ``evaluate_drafter``, whose records these stand among; ``target`` is in the precision of serving.
    """
    chosen = sorted(_first_of_each_set(prompts, config.evaluation.served_prompts))
    bench = _Bench(config, target, drafter, [prompts[index] for index in chosen], untrained=None, with_ways=True)
    return bench.decode(folder, progress, f"prompts in {name_of(target.dtype)}")


def _first_of_each_set(prompts: Sequence[EvaluationPrompt], count: int | None) -> set[int]:
    """Indices of the first ``count`` prompts of each set, or of all prompts."""
    seen: Counter[str] = Counter()
    chosen = set()
    for index, prompt in enumerate(prompts):
        seen[prompt.set] += 1
        if count is None or seen[prompt.set] <= count:
            chosen.add(index)
    return chosen


class _Bench:
    """The target and the drafters, ready to answer these prompts. Making one raises what ``evaluate_drafter`` does."""

    def __init__(
        self, config: PipelineConfig, target: TargetModel, drafter: DFlashDrafter, prompts: Sequence[EvaluationPrompt],
        *, untrained: DFlashDrafter | None, with_ways: bool,
    ):  # fmt: skip
        if not prompts:
            remedy = "Raise data.heldout_fraction or give more prompts"
            raise DataError("evaluation", [Problem("data.heldout_fraction", config.data.heldout_fraction, "left no prompt to evaluate on", remedy)])
        settings = config.evaluation
        if problems := list(block_size_problems(settings, drafter.config.block_size)):  # this drafter may be another than the settings'
            raise InputError("evaluation", problems)
        self._settings, self._target, self._prompts = settings, target, prompts
        longest = max(len(prompt.tokens) for prompt in prompts)
        self.room = Room(1, longest, settings.max_new_tokens, settings.block_size or drafter.config.block_size)
        self._ways = further_ways(settings, self.room.block_size) if with_ways else []
        require_room_of_ways(self._ways, target, drafter.config, prompts, settings.max_new_tokens)
        originals = {"trained": drafter} if untrained is None else {"trained": drafter, "untrained": untrained}
        with fits(target, self.room, drafter.config, "evaluation.max_new_tokens", settings.max_new_tokens, drafters=len(originals)):
            self._models = {name: _decoding_copy(model, target) for name, model in originals.items()}
            self._verifier = open_verifier(target, self.room, graphs=settings.cuda_graphs is not False)
        if settings.cuda_graphs is True and not self._verifier.graphs:
            message = f"{target.info.name} on {target.device} cannot be decoded with CUDA graphs"
            raise InputError("evaluation", [Problem("evaluation.cuda_graphs", True, message, "Set it to auto, or evaluation.device to cuda")])
        self._decoders: dict[str | None, Decoder] = {}
        digests = {name: digest_of_drafter(model) for name, model in self._models.items()}
        self.drafter_digest, self.prompts_digest = digests["trained"], digest_of([asdict(prompt) for prompt in prompts])
        measured = [target.info.digest, self.drafter_digest, digests.get("untrained"), self.room.block_size, self.room.max_new_tokens]
        self._measured = [*measured, str(target.dtype), str(target.device), self._verifier.graphs]

    def decode(self, folder: Path, progress: Progress, unit: str) -> InPrecision:
        """Decode what ``folder`` has no records of, and sum up."""
        folder.mkdir(parents=True, exist_ok=True)
        prompts, settings = self._prompts, self._settings
        path, keys = folder / RECORDS, [self.key(prompt) for prompt in prompts]
        records = {record.key: record for record in read_records(path, set(keys))}
        compared = _first_of_each_set(prompts, settings.untrained_prompts) if "untrained" in self._models else set()
        missing = [index for index, key in enumerate(keys) if not _covers(records.get(key), wants_untrained=index in compared)]
        if missing:
            self.warm_up(prompts[missing[0]])
        for done, index in enumerate(missing, start=len(prompts) - len(missing)):
            progress(done, len(prompts), unit)
            record = self.measure(prompts[index], with_untrained=index in compared)
            append_record(path, record)
            records[record.key] = record
        progress(len(prompts), len(prompts), unit)
        measured = measure_ways(
            self._ways, self._target, self._models["trained"], prompts, settings.max_new_tokens, folder,
            key=digest_of([self._measured, self.prompts_digest]), graphs=settings.cuda_graphs is not False, progress=progress,
        )  # fmt: skip
        return in_precision([records[key] for key in keys], self.room.block_size, name_of(self._target.dtype), measured)

    def key(self, prompt: EvaluationPrompt) -> str:
        """Digest of the prompt and of everything it is measured with."""
        return digest_of([*self._measured, prompt.set, prompt.id, list(prompt.tokens)])

    def warm_up(self, prompt: EvaluationPrompt) -> None:
        """First calls allocate, choose kernels and capture graphs; their time is nobody's."""
        for model in (None, *self._models):
            self._answer(model, prompt, most=2 * self.room.block_size)

    def measure(self, prompt: EvaluationPrompt, *, with_untrained: bool) -> PromptRecord:
        """Answer one prompt in every way, one after the other."""
        prompt_ids = prompt.tokens
        baseline = self._answer(None, prompt)
        trained = self._answer("trained", prompt)
        untrained = self._answer("untrained", prompt) if with_untrained else None
        divergence = find_divergence(self._verifier, prompt_ids, baseline.tokens, trained.tokens, self.room.block_size)
        exact = self._target.dtype == torch.float32
        return PromptRecord(
            key=self.key(prompt),
            set=prompt.set,
            id=prompt.id,
            conversation=prompt.conversation,
            prompt_tokens=len(prompt_ids),
            baseline=baseline,
            trained=trained,
            untrained=untrained,
            divergence=divergence,
            lossless=divergence is None or not (exact or divergence.beyond_noise),
        )

    def _answer(self, model: str | None, prompt: EvaluationPrompt, most: int | None = None) -> Generation:
        """By the target alone, or with one of the drafters."""
        if model not in self._decoders:
            drafter = None if model is None else self._models[model]
            self._decoders[model] = open_decoder(self._target, drafter, self._verifier, self.room, stop_ids=self._target.info.eos_token_ids)
        return self._decoders[model].generate([prompt.tokens], most=most)[0]


def name_of(dtype: torch.dtype) -> str:
    """As settings and results name a precision."""
    return str(dtype).removeprefix("torch.")


def _decoding_copy(drafter: DFlashDrafter, target: TargetModel) -> DFlashDrafter:
    return copy.deepcopy(drafter).to(target.device, target.dtype).eval()  # a drafter that is being trained stays as it is


def _covers(record: PromptRecord | None, *, wants_untrained: bool) -> bool:
    return record is not None and (record.untrained is not None or not wants_untrained)


def digest_of_drafter(drafter: DFlashDrafter) -> str:
    """sha256 (hex) over what a drafter computes: the names, types and bytes of its weights, and its configuration but for the target's name.

    The same weights at other taps, with another rope or mask token are another drafter, and were not measured with the first.
    """
    settings = {name: value for name, value in asdict(drafter.config).items() if name != "target_name"}
    digest = hashlib.sha256(digest_of(settings).encode())
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
