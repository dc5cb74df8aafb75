"""On CUDA: rounds that are replayed as graphs give what they give without, and what a CPU gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_core.config import DrafterConfig
from dflash_core.decoding import GREEDY, Generation, Room, Sampling, open_decoder, open_verifier
from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.target import TargetModel
from tests.target.tiny import save_tiny_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

BATCHES = [[[257, 40, 41, 99], [257, 9], [257, *range(30, 120)]], [[257, 8], [257, 77, 3]]]


def answers(folder: Path, device: str, *, graphs: bool, drafts: bool, sampling: Sampling) -> list[Generation]:
    target = TargetModel.from_pretrained(folder, dtype=torch.float32, device=device)
    config = DrafterConfig(num_layers=2, block_size=8, mask_token_id=259, tap_layers=(0, 2), sliding_window=30, full_attention_layers=(1,))
    drafter = DFlashDrafter(DFlashConfig.from_target(target.info, config)).init_weights(0).to(device).eval() if drafts else None
    room = Room(rows=4, longest_prompt=91, max_new_tokens=40, block_size=6)
    verifier = open_verifier(target, room, graphs=graphs)
    assert verifier.graphs == (graphs and device == "cuda")
    decoder = open_decoder(target, drafter, verifier, room, stop_ids=target.info.eos_token_ids, sampling=sampling)
    return [answer for batch in BATCHES for answer in decoder.generate(batch, seeds=range(1, 1 + len(batch)))]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, top_p=0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafts", [True, False], ids=["drafted", "alone"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_graphs_change_no_text_and_no_round(family: str, drafts: bool, sampling: Sampling, tmp_path: Path) -> None:
    folder = save_tiny_target(family, tmp_path)
    texts, rounds = [], []
    for device, graphs in (("cuda", True), ("cuda", False), ("cpu", False)):
        found = answers(folder, device, graphs=graphs, drafts=drafts, sampling=sampling)
        texts.append([one.tokens for one in found])
        rounds.append([one.accepted for one in found])
    assert texts[0] == texts[1]
    assert rounds[0] == rounds[1]
    assert texts[0] == texts[2]


def test_times_of_the_stages_of_graphs_are_parts_of_the_whole(tmp_path: Path) -> None:
    for one in answers(save_tiny_target("llama", tmp_path), "cuda", graphs=True, drafts=True, sampling=GREEDY):
        stages = (one.prefill_seconds, one.draft_seconds, one.verify_seconds)
        assert all(part > 0 for part in stages)
        assert sum(stages) <= one.seconds
