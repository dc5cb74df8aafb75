"""A pipeline of some seconds: a tiny random target, prompts, and several batches, shards, checkpoints and held-out prompts of them.

config = write_tiny_run(tmp_path)                                   # a YAML file
results = run_all(Plan(load_config(config)))
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_core.pipeline import StageResult, run_stage
from dflash_core.plan import STAGES, Plan
from tests.target.tiny import save_tiny_target

PROMPTS = 32
STEPS = 12
ON_DISK = tuple(name for name in STAGES if name != "warm_up")
CONFIG = """\
run: {{name: tiny, workspace: {folder}/workspace, seed: 1}}
target: {{model: {folder}/target, dtype: float32}}
data:
  sources: [{{source: {folder}/prompts.jsonl}}]
  generation: {{max_new_tokens: 12, batch_size: 8}}
  max_length: 64
  heldout_fraction: 0.2
  max_rejected_fraction: 1.0
extraction: {{samples_per_shard: 8, batch_tokens: 200, feature_dtype: float32}}
drafter: {{num_layers: 1, num_taps: 2, block_size: 4, mask_token_id: 259}}
training:
  devices: [cpu, cpu]
  row_length: 64
  num_anchors: 8
  epochs: 50
  max_steps: {steps}
  learning_rate: 1e-3
  precision: float32
  checkpoint_every: 5
evaluation: {{num_prompts: 3, max_new_tokens: 8, untrained_prompts: 1}}
"""


def write_tiny_run(folder: Path) -> Path:
    """Write target, prompts and configuration; returns the path of the configuration."""
    save_tiny_target("llama", folder / "target", num_hidden_layers=6)
    write_prompts(folder / "prompts.jsonl", PROMPTS)
    path = folder / "tiny.yaml"
    path.write_text(CONFIG.format(folder=folder, steps=STEPS), encoding="utf-8")
    return path


def write_prompts(path: Path, count: int) -> None:
    """``count`` prompts of different lengths, one a line."""
    lines = [json.dumps({"prompt": f"Say {index} and then {index * index}{'.' * (index % 7)}"}) for index in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run_all(plan: Plan, **arguments: Any) -> dict[str, StageResult]:
    """Run every stage, as ``python -m dflash_core run`` does."""
    return {name: run_stage(plan, name, **arguments) for name in ON_DISK if name != "shards" or plan.extracts}
