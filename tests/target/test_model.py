"""Taps, cached decoding and the shared vocabulary, on tiny random models of every supported family."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dflash_core.errors import TargetError
from dflash_core.target import TargetModel, TargetVocabulary
from dflash_core.target.structure import find_structure
from tests.target.tiny import LAYERS, tiny_model


def _batch(lengths: tuple[int, ...] = (21, 13), seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids and the mask of right-padded rows."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, 256, (len(lengths), max(lengths)), generator=generator)
    mask_BT = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return ids_BT.where(mask_BT.bool(), 256), mask_BT


def _layer_calls(target: TargetModel) -> tuple[list[int], list[Any]]:
    """Ids of the layers that run from now on, and the handles that stop the counting."""
    calls: list[int] = []
    structure = target._structure
    handles = [layer.register_forward_hook(lambda *_, index=index: calls.append(index)) for index, layer in enumerate(structure.layers)]
    norm = getattr(structure.decoder, structure.norm_name)
    handles.append(norm.register_forward_hook(lambda *_: calls.append(LAYERS)))
    return calls, handles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [True, False])
def test_taps_are_output_hidden_states_bit_for_bit(target: TargetModel, dtype: torch.dtype, masked: bool) -> None:
    target = TargetModel.from_pretrained(target.info, dtype=dtype)
    ids_BT, mask_BT = _batch()
    mask = mask_BT if masked else None
    states = target._model(ids_BT, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
    features = target.hidden_states(ids_BT, mask, (0, 2))
    assert features.dtype == dtype
    assert torch.equal(features, torch.cat([states[1], states[3]], dim=-1))


def test_a_tap_of_the_last_layer_is_taken_before_the_final_norm(target: TargetModel) -> None:
    ids_BT, mask_BT = _batch()
    states = target._model(ids_BT, attention_mask=mask_BT, output_hidden_states=True, use_cache=False).hidden_states
    features = target.hidden_states(ids_BT, mask_BT, (LAYERS - 1,))
    norm = getattr(target._structure.decoder, target._structure.norm_name)
    assert not torch.equal(features, states[-1])
    assert torch.equal(norm(features), states[-1])


@pytest.mark.parametrize("deepest", range(LAYERS))
def test_no_layer_above_the_deepest_tap_and_no_final_norm_runs(target: TargetModel, deepest: int) -> None:
    calls, handles = _layer_calls(target)
    target.hidden_states(*_batch(), sorted({0, deepest}))
    assert calls == list(range(deepest + 1))
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("target", ["qwen3"], indirect=True)
def test_the_full_model_is_whole_while_other_threads_tap(target: TargetModel) -> None:
    ids_BT, mask_BT = _batch()
    expected = {taps: target.hidden_states(ids_BT, mask_BT, taps) for taps in [(0,), (1, 2), (3,)]}
    logits = target._model(ids_BT, attention_mask=mask_BT).logits
    wrong: list[str] = []

    def work(taps: tuple[int, ...]) -> None:
        for _ in range(20):
            if not torch.equal(target.hidden_states(ids_BT, mask_BT, taps), expected[taps]):
                wrong.append(f"taps {taps}")
            if not torch.equal(target.forward(ids_BT, target.new_cache()).logits[0], logits[0]):
                wrong.append("logits")

    threads = [threading.Thread(target=work, args=(taps,)) for taps in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_features_do_not_require_grad_and_can_train_a_drafter(target: TargetModel) -> None:
    features = target.hidden_states(*_batch(), (1,))
    layer = nn.Linear(features.shape[-1], 1)
    layer(features).sum().backward()  # inference-mode tensors could not be saved for this
    assert not features.requires_grad
    assert layer.weight.grad is not None


def test_decoding_with_a_cache_equals_one_pass(target: TargetModel) -> None:
    ids_BT, _ = _batch((21,))
    whole = target._model(ids_BT, use_cache=False).logits
    features = target.hidden_states(ids_BT, None, (0, 3))
    cache = target.new_cache()
    parts = [target.forward(part, cache, tap_layers=(0, 3)) for part in ids_BT.split([9, 1, 4, 7], dim=1)]
    torch.testing.assert_close(torch.cat([part.logits for part in parts], 1), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat([part.features for part in parts], 1), features, rtol=1e-4, atol=1e-4)


def test_a_cropped_cache_has_forgotten_the_rest_even_beyond_a_sliding_window(target: TargetModel) -> None:
    ids_BT, _ = _batch((21,))
    cache = target.new_cache()
    target.forward(ids_BT[:, :17], cache)
    target.crop_cache(cache, 12)
    again = target.forward(ids_BT[:, 12:], cache).logits
    straight = target.new_cache()
    target.forward(ids_BT[:, :12], straight)
    assert cache.get_seq_length() == 21
    torch.testing.assert_close(again, target.forward(ids_BT[:, 12:], straight).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["llama"], indirect=True)
def test_cropping_to_the_present_length_changes_nothing_and_to_more_is_refused(target: TargetModel) -> None:
    cache = target.new_cache()
    target.crop_cache(cache, 0)
    target.forward(_batch((7,))[0], cache)
    target.crop_cache(cache, 7)
    assert cache.get_seq_length() == 7
    with pytest.raises(ValueError, match="cache of 7 tokens to 8"):
        target.crop_cache(cache, 8)


def test_left_padding_changes_no_logits(target: TargetModel) -> None:
    ids_BT, _ = _batch((11,))
    alone = target.forward(ids_BT, target.new_cache(), logits_to_keep=1).logits
    padded = torch.cat([torch.full((1, 6), 256), ids_BT], dim=1)
    mask = torch.cat([torch.zeros(1, 6, dtype=torch.long), torch.ones_like(ids_BT)], dim=1)
    output = target.forward(padded, target.new_cache(), attention_mask=mask, logits_to_keep=1)
    assert output.logits.shape == (1, 1, target.info.vocab_size)
    torch.testing.assert_close(output.logits, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vocabulary_read_from_files_is_what_the_target_sees_and_says(target: TargetModel, dtype: torch.dtype) -> None:
    target = TargetModel.from_pretrained(target.info, dtype=dtype)
    ids_BT, _ = _batch((15,))
    seen: list[torch.Tensor] = []
    target._structure.layers[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    output = target._model(ids_BT, output_hidden_states=True)
    vocabulary = TargetVocabulary.from_pretrained(target.info, dtype=dtype)
    assert torch.equal(vocabulary.embed(ids_BT), seen[0])
    assert torch.equal(vocabulary.logits(output.hidden_states[-1]), output.logits)
    assert torch.equal(target.vocabulary.head_weight, vocabulary.head_weight)
    assert (vocabulary.head_weight is vocabulary.embedding_weight) == target.info.tie_word_embeddings


@pytest.mark.parametrize("target", ["llama"], indirect=True)
@pytest.mark.parametrize("taps", [(), (LAYERS,), (-1, 0)])
def test_taps_outside_the_target_name_the_setting_and_the_range(target: TargetModel, taps: tuple[int, ...]) -> None:
    with pytest.raises(TargetError, match=r"drafter.tap_layers = .*0 to 3"):
        target.hidden_states(*_batch(), taps)


@pytest.mark.parametrize("target", ["qwen3"], indirect=True)
def test_several_taps_come_side_by_side_in_order(target: TargetModel) -> None:
    @settings(max_examples=15, deadline=None)
    @given(taps=st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=LAYERS, unique=True), seed=st.integers(0, 99))
    def check(taps: list[int], seed: int) -> None:
        ids_BT, mask_BT = _batch((9, 5), seed)
        singles = [target.hidden_states(ids_BT, mask_BT, (layer,)) for layer in taps]
        assert torch.equal(target.hidden_states(ids_BT, mask_BT, taps), torch.cat(singles, dim=-1))

    check()


def test_an_unsupported_model_is_told_what_was_looked_for() -> None:
    model = tiny_model("llama")
    model.model.layers = nn.ModuleList(list(model.model.layers)[:-1])
    with pytest.raises(TargetError, match=r"LlamaForCausalLM.*input embedding and a list of num_hidden_layers = 4 layers side by side; found none"):
        find_structure(model)


def test_a_second_norm_beside_the_layers_is_refused_by_name() -> None:
    model = tiny_model("qwen3")
    model.model.other_norm = nn.RMSNorm(32)
    with pytest.raises(TargetError, match="one final norm of width 32 in Qwen3Model; found norm, other_norm"):
        find_structure(model)


def test_embeddings_that_are_scaled_unbeknown_to_us_are_refused(tiny_folder: Callable[[str], Path]) -> None:
    target = TargetModel.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    target._structure.embedding.register_forward_hook(lambda _module, _arguments, output: output * 3.0)
    with pytest.raises(TargetError, match="something else than its embeddings times 1"):
        TargetModel(target._model, target.tokenizer, target.info)
