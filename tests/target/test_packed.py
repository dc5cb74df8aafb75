"""A packed pass gives every document what it gets alone, whatever lies beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash_core.target import TargetModel
from dflash_core.target.attention import Documents, packed_attention
from dflash_core.target.packed import FAMILIES as PROVEN
from tests.target.tiny import FAMILIES, HYBRID

TAPS = (0, 1, 3)
LENGTHS = (21, 3, 40, 1, 9, 8)  # longer and shorter than the sliding windows of 8


def _documents(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator, dtype=torch.int32) for length in lengths]


def _alone(target: TargetModel, documents: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([target.hidden_states(ids.long()[None], None, TAPS)[0] for ids in documents])


def test_every_document_gets_what_it_gets_alone(target: TargetModel) -> None:
    assert target.packs
    features_TF = target.packed_hidden_states(_documents(), TAPS)
    torch.testing.assert_close(features_TF, _alone(target, _documents()), rtol=1e-4, atol=2e-4)


def test_the_last_hidden_states_are_what_the_head_gets(target: TargetModel) -> None:
    states_TX = target.packed_hidden_states(_documents(), TAPS, last_hidden=True)
    features_TF, last_TH = states_TX.split([states_TX.shape[1] - target.info.hidden_size, target.info.hidden_size], dim=1)
    torch.testing.assert_close(features_TF, _alone(target, _documents()), rtol=1e-4, atol=2e-4)
    logits_TV = torch.cat([target.forward(ids.long()[None], target.new_cache()).logits[0] for ids in _documents()])
    torch.testing.assert_close(target.vocabulary.logits(last_TH), logits_TV, rtol=1e-4, atol=5e-4)
    ids_TK, logprobs_TK = target.likeliest(last_TH, 5)
    exact_TV = logits_TV.log_softmax(-1)
    torch.testing.assert_close(logprobs_TK, exact_TV.topk(5).values, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(exact_TV.gather(1, ids_TK.long()), logprobs_TK, rtol=1e-4, atol=1e-3)


def test_another_document_changes_no_bit_of_its_neighbours(target: TargetModel) -> None:
    documents = _documents()
    before = target.packed_hidden_states(documents, TAPS).split(LENGTHS)
    documents[2] = documents[2].flip(0)
    after = target.packed_hidden_states(documents, TAPS).split(LENGTHS)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, True, True, True]


def test_no_family_is_packed_without_a_test() -> None:
    assert set(FAMILIES) == PROVEN


@pytest.mark.parametrize("family", list(HYBRID))
def test_layers_with_a_state_get_a_padded_batch_and_documents_what_they_get_alone(family: str, tiny_folder: Callable[[str], Path]) -> None:
    target = TargetModel.from_pretrained(tiny_folder(family), dtype=torch.float32)
    assert not target.packs
    features_TF = target.packed_hidden_states(_documents(), TAPS)
    torch.testing.assert_close(features_TF, _alone(target, _documents()), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("target", ["gemma3_text"], indirect=True)
def test_the_target_attends_as_before_while_other_threads_pack(target: TargetModel) -> None:
    ids_BT = torch.stack(_documents((30, 30))).long()
    expected, packed = target.hidden_states(ids_BT, None, TAPS), target.packed_hidden_states(_documents(), TAPS)
    wrong: list[str] = []

    def work(kind: str) -> None:
        for _ in range(10):
            if kind == "packed" and not torch.equal(target.packed_hidden_states(_documents(), TAPS), packed):
                wrong.append(kind)
            if kind == "batch" and not torch.equal(target.hidden_states(ids_BT, None, TAPS), expected):
                wrong.append(kind)

    threads = [threading.Thread(target=work, args=(kind,)) for kind in ("packed", "batch", "packed")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("sinks", [False, True])
def test_flash_attention_for_variable_lengths_is_attention_by_hand(window: int | None, sinks: bool) -> None:
    """fp32 goes document by document, bf16 through the kernel; 4 query heads share 2 of keys and values."""
    generator = torch.Generator("cuda").manual_seed(0)
    documents = Documents.of(_documents(), torch.device("cuda"))
    query, key, value = (torch.randn(1, heads, sum(LENGTHS), 64, device="cuda", generator=generator) for heads in (4, 2, 2))
    s_aux = torch.randn(4, device="cuda", generator=generator) if sinks else None
    exact, _ = packed_attention(torch.nn.Module(), query, key, value, None, documents=documents, sliding_window=window, s_aux=s_aux)
    halves = (x.bfloat16() for x in (query, key, value))
    found, _ = packed_attention(torch.nn.Module(), *halves, None, documents=documents, sliding_window=window, s_aux=s_aux)
    assert found.shape == exact.shape == (1, sum(LENGTHS), 4, 64)
    torch.testing.assert_close(found.float(), exact, rtol=2e-2, atol=3e-2)
