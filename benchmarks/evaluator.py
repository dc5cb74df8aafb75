"""Does evaluation during training disturb the steps? A drafter trains alone, then beside an evaluator that never rests.

python -m benchmarks.evaluator                                        both on cuda:0, at the size of Qwen3-8B; about 100 s
python -m benchmarks.evaluator --evaluator cuda:1                     the evaluator on another GPU
python -m benchmarks.evaluator --shape tiny --device cpu --evaluator cpu --steps 12 --tokens 4

The target has random weights, so that hardly a draft is accepted and an evaluation takes as many passes as it can. An evaluation is due after every
step, and all that come while one goes on are skipped: what is measured is the worst that can be asked for.
"""

from __future__ import annotations

import logging
import statistics

import numpy as np
import torch

from benchmarks.common import SHAPES, Recorder, Shape, arguments, recorder_for
from benchmarks.engine import SEED, TrainingRun, target_info
from benchmarks.online import random_target
from dflash_core.evaluation import EvaluationPrompt, HeldoutJudge
from dflash_core.training import EVALUATIONS, read_metrics
from dflash_core.training.guard import compiled_graphs

SETTLED = 5  # steps before which nothing counts
PROMPTS = 8


def random_prompts(shape: Shape) -> list[EvaluationPrompt]:
    """Prompts of no meaning, of 30 to 200 tokens, or fewer where rows are shorter."""
    draws = np.random.default_rng(SEED)
    lengths = draws.integers(30, 200, PROMPTS).clip(max=shape.T // 4)
    tokens = [tuple(draws.integers(2, shape.V, length).tolist()) for length in lengths]
    return [EvaluationPrompt("heldout", str(number), str(number), prompt) for number, prompt in enumerate(tokens)]


def measure_evaluator(recorder: Recorder, shape: Shape, device: str, where: str, steps: int, tokens: int) -> None:
    """The ratio of the median steps; seconds of an evaluation; growth of memory on the trainer's device meanwhile; late compilations."""
    evaluation = {"every_steps": 1, "prompts": PROMPTS, "max_new_tokens": tokens, "device": where}
    with TrainingRun(
        shape, [device], steps, compile="auto", cuda_graphs="auto", evaluation=evaluation,
        judge=lambda config: HeldoutJudge(config, random_target(shape, target_info(shape), where), random_prompts(shape)),
    ) as run:  # fmt: skip
        warmed = run.report.evaluator
        assert warmed is not None
        print(f"warmed up: replica {run.report.devices[0].seconds:.1f} s, evaluator {warmed.seconds:.1f} s", flush=True)
        graphs = compiled_graphs()
        run.train(evaluate=False)
        alone = run.seconds_of_a_step(SETTLED)
        run.train()
        beside, records = run.seconds_of_a_step(SETTLED), run.records[SETTLED:]
        evaluations = read_metrics(run.records_path.with_name(EVALUATIONS))[1:]
        grown = {name: records[-1][name] - records[0][name] for name in records[0] if name.startswith("memory_reserved")}
        detail = {
            "devices": [device, where], "alone_ms": round(1e3 * alone, 2), "beside_ms": round(1e3 * beside, 2), "evaluations": len(evaluations),
            "skipped": evaluations[-1]["eval/skipped"], "late_compiles": compiled_graphs() - graphs, "grown": grown,
            "memory_gib": round((warmed.memory_after - warmed.memory_before) / 2**30, 2),
        }  # fmt: skip
    suffix = "" if where == device else ".elsewhere"
    recorder.add(f"evaluator.step_ratio{suffix}", beside / alone, "ratio", len(records), detail)
    seconds = [evaluation["eval/seconds"] for evaluation in evaluations]
    recorder.add(f"evaluator.seconds{suffix}", statistics.median(seconds), "s", len(seconds), {"prompts": PROMPTS, "new_tokens": tokens})


def main(words: list[str] | None = None) -> int:
    """Measure; 1 if it failed."""
    parser = arguments(__doc__ or "", [])
    parser.add_argument("--evaluator", help="device of the evaluator; default: the trainer's")
    parser.add_argument("--steps", type=int, default=60, help="steps of each training")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    options = parser.parse_args(words)
    device = "cuda:0" if options.device == "cuda" else options.device
    where = options.evaluator or device
    recorder = recorder_for(options)
    logging.getLogger("dflash_core.training.evaluation_thread").setLevel(logging.ERROR)  # nearly all are skipped here
    if where == "cpu":
        torch.set_num_threads(1)  # decoding beside a trainer on the same cores
    name = "evaluator.step_ratio" + ("" if where == device else ".elsewhere")
    recorder.attempt(name, lambda: measure_evaluator(recorder, SHAPES[options.shape], device, where, options.steps, options.tokens))
    return int(bool(recorder.failures))


if __name__ == "__main__":
    raise SystemExit(main())
