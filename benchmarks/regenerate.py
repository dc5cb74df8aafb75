"""Regeneration of responses by the target here: tokens a second, where the time goes, and whether the answers are those of the growing cache.

python -m benchmarks.regenerate --prompts ../shared/data/prompts/gsm8k_train.jsonl        (about a minute on an H200)
python -m benchmarks.regenerate --prompts prompts.jsonl --device cpu --dtype float32 --count 8 --rows 4 --max-new-tokens 16

Prompts are a JSONL file of ``messages``; a file shorter than ``--count`` is gone through again.

regenerate.tok_s           tokens of greedy answers per second of wall time, everything included but loading the model; its detail has the share
                           of rows that were in use, and the share of answers that ended by themselves
regenerate.step.<how>      ms of one step of all rows: greedy, sampled, sampled from a nucleus
regenerate.prefill         prompt tokens per second
regenerate.agreement       share of the tokens of 32 greedy answers that one pass of the model over the whole text, without graphs and static caches,
                           finds likeliest too; its detail has by how much it prefers another where not (logits of bf16 between 16 and 32 are
                           1/8 apart, so that ties are common), the share of answers that are the same, token for token, from the growing
                           cache, and the share that is the same when other prompts come with them
regenerate.kernels         ms of a greedy step by kernel, the ten largest, as the profiler sees them
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import Recorder, arguments, recorder_for
from dflash_core.config import GenerationConfig, TargetConfig
from dflash_core.data import render_prompt
from dflash_core.data.types import Message
from dflash_core.target import TargetModel, resolve_target
from dflash_core.target.batch import Batch

HOW = {"greedy": {}, "sampled": {"temperature": 0.8}, "nucleus": {"temperature": 0.8, "top_p": 0.95}}


def read_prompts(path: Path, target: TargetModel, count: int) -> list[list[int]]:
    """The first messages of each line, up to a response, rendered."""
    prompts = []
    with path.open(encoding="utf-8") as file:
        for line in itertools.islice(file, count):
            messages = itertools.takewhile(lambda message: message["role"] != "assistant", json.loads(line)["messages"])
            prompts.append(render_prompt(target.tokenizer, [Message(message["role"], message["content"]) for message in messages]))
    return list(itertools.islice(itertools.cycle(prompts), count))


def whole(recorder: Recorder, target: TargetModel, prompts: Sequence[list[int]], settings: GenerationConfig) -> None:
    """regenerate.tok_s"""
    list(target.answers(prompts[: settings.batch_size], settings.model_copy(update={"max_new_tokens": 4})))  # kernels are compiled once a machine
    steps = itertools.count()
    step = Batch.step

    def counted(batch: Batch) -> None:
        next(steps)
        step(batch)

    Batch.step = counted  # type: ignore[method-assign]
    began = time.perf_counter()
    responses = [response for _, response in target.answers(prompts, settings)]
    seconds = time.perf_counter() - began
    Batch.step = step  # type: ignore[method-assign]
    tokens = sum(len(response.tokens) for response in responses)
    detail = {
        "rows": settings.batch_size,
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "steps": next(steps),
        "stopped": round(sum(response.finish_reason == "stop" for response in responses) / len(responses), 3),
    }
    detail["rows_in_use"] = round((tokens - len(prompts)) / (detail["steps"] * settings.batch_size), 3)
    recorder.add("regenerate.tok_s", tokens / seconds, "tok/s", 1, detail)


def parts(recorder: Recorder, target: TargetModel, prompts: Sequence[list[int]], settings: GenerationConfig) -> None:
    """regenerate.step.*, .prefill and .kernels: all rows at their prompts' ends and 64 tokens on."""
    rows = settings.batch_size
    chosen = sorted(itertools.islice(itertools.cycle(prompts), rows), key=len)  # as they are admitted
    for how, changes in HOW.items():
        batch = Batch(target, rows, max(map(len, chosen)), settings.model_copy(update=changes), frozenset())
        size = batch.most_admitted
        admissions = [list(range(start, min(start + size, rows))) for start in range(0, rows, size)]
        for _ in range(2):  # the first time kernels are compiled and graphs captured
            began = _clock(target)
            for admission in admissions:
                batch.admit([chosen[row] for row in admission], admission, admission)
            prefill = _clock(target) - began
        for _ in range(4):
            batch.step()
        count = min(64, settings.max_new_tokens - 8)
        began = _clock(target)
        for _ in range(count):
            batch.step()
        ms = (_clock(target) - began) * 1e3 / count
        recorder.add(f"regenerate.step.{how}", ms, "ms", count, {"rows": rows, "tok_s": round(rows / ms * 1e3)})
        if how == "greedy":
            recorder.add("regenerate.prefill", sum(map(len, chosen)) / prefill, "tok/s", len(admissions), {"prompts": rows, "together": size})
            if target.device.type == "cuda":
                recorder.attempt("regenerate.kernels", lambda batch=batch: kernels(recorder, batch))  # type: ignore[misc]
        del batch


def kernels(recorder: Recorder, batch: Batch, steps: int = 4) -> None:
    """regenerate.kernels"""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            batch.step()
        torch.cuda.synchronize()
    found = [(event.key, event.self_device_time_total / 1e3 / steps, event.count / steps) for event in profile.key_averages()]
    found.sort(key=lambda item: -item[1])
    largest = {name[:60]: [round(ms, 4), round(count, 1)] for name, ms, count in found[:10]}
    recorder.add("regenerate.kernels", sum(ms for _, ms, _ in found), "ms", steps, {"launches": round(sum(item[2] for item in found)), **largest})


def agreement(recorder: Recorder, target: TargetModel, prompts: Sequence[list[int]], settings: GenerationConfig) -> None:
    """regenerate.agreement"""
    chosen = list(prompts[:32])
    answers = dict(target.answers(chosen, settings))
    others = dict(target.answers([*reversed(chosen), *prompts[32:96]], settings))
    alone = sum(others[len(chosen) - 1 - index] == answers[index] for index in range(len(chosen))) / len(chosen)
    wanted = growing(target, chosen, settings.max_new_tokens)
    same = sum(list(answers[index].tokens) == want[: len(answers[index].tokens)] for index, want in enumerate(wanted)) / len(chosen)
    gaps = preferred(target, chosen, [answers[index].tokens for index in range(len(chosen))])
    other = [gap for gap in gaps if gap > 0]
    detail = {
        "tokens": len(gaps),
        "largest_gap": round(max(other, default=0.0), 4),
        "mean_gap": round(sum(other) / max(1, len(other)), 4),
        "same_from_growing_cache": same,
        "same_in_other_company": alone,
    }
    recorder.add("regenerate.agreement", 1 - len(other) / len(gaps), "share", len(chosen), detail)


@torch.no_grad()
def preferred(target: TargetModel, prompts: Sequence[list[int]], answers: Sequence[Sequence[int]]) -> list[float]:
    """Of each token of the answers: by how much one pass over the text gives another one a higher logit; 0 for the likeliest."""
    gaps: list[float] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]], device=target.device)
        logits = target.forward(ids, target.new_cache()).logits[0, len(prompt) - 1 : -1].float()
        gaps += (logits.amax(-1) - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]).tolist()
    return gaps


@torch.no_grad()
def growing(target: TargetModel, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """Greedy continuations of ``count`` tokens by the growing cache, left-padded, past any end."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * (len(prompt) + count) for prompt in prompts], device=target.device)
    cache, tokens = target.new_cache(), []
    for step in range(count):
        ids = target.forward(ids, cache, attention_mask=mask[:, : width + step], logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(ids)
    continuations: list[list[int]] = torch.cat(tokens, dim=1).tolist()
    return continuations


def _clock(target: TargetModel) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


def main() -> int:
    """Measure what the command line asks for."""
    sections = {"whole": whole, "parts": parts, "agreement": agreement}
    parser = arguments(__doc__.splitlines()[0], sections)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with messages")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as target.model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--count", type=int, default=15_000, help="prompts")
    parser.add_argument("--rows", type=int, default=1024, help="as data.generation.batch_size")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    options = parser.parse_args()
    recorder = recorder_for(options)
    info = resolve_target(TargetConfig(model=options.model), progress=None)
    target = TargetModel.from_pretrained(info, dtype=options.dtype, device=options.device)
    prompts = read_prompts(options.prompts, target, options.count)
    settings = GenerationConfig(max_new_tokens=options.max_new_tokens, batch_size=options.rows)
    names = {"whole": "regenerate.tok_s", "parts": "regenerate.step.greedy", "agreement": "regenerate.agreement"}
    for section in options.sections:
        recorder.attempt(names[section], lambda section=section: sections[section](recorder, target, prompts, settings))
    return len(recorder.failures)


if __name__ == "__main__":
    raise SystemExit(main())
