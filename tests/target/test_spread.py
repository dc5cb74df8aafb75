"""A target spread over several devices: the numbers of one device, from a pipeline in which every stage has a batch of its own."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.config import GenerationConfig, load_config
from dflash_core.errors import ConfigError, TargetError
from dflash_core.pipeline import run_stage
from dflash_core.plan import Plan
from dflash_core.target import TargetModel, read_target_info
from dflash_core.target.spread import Stages, divide, place, without_hooks
from tests.shards.fakes import contents
from tests.target.tiny import FAMILIES, HYBRID, LAYERS
from tests.tiny_run import write_tiny_run
from tests.waiting import PATIENCE_S

TAPS = (0, 1, 3)
TWO = "cpu+cpu"


def documents(lengths: tuple[int, ...] = (21, 3, 40), seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator, dtype=torch.int32) for length in lengths]


def load(folder: Path, device: str = "cpu") -> TargetModel:
    return TargetModel.from_pretrained(folder, dtype=torch.float32, device=device)


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRID])
def test_hidden_states_are_those_of_one_device_bit_for_bit(family: str, tiny_folder: Callable[[str], Path]) -> None:
    one, two = load(tiny_folder(family)), load(tiny_folder(family), TWO)
    assert len(two.devices) == 2
    assert two.packs == one.packs
    wanted = one.packed_hidden_states(documents(), TAPS, last_hidden=True)
    found = two.packed_hidden_states(documents(), TAPS, last_hidden=True)
    assert torch.equal(found, wanted)
    hidden = wanted[:, -one.info.hidden_size :]
    assert all(torch.equal(a, b) for a, b in zip(two.likeliest(hidden, 3), one.likeliest(hidden, 3), strict=True))


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])  # both tie the head to the embedding
def test_answers_and_decoding_are_those_of_one_device(family: str, tiny_folder: Callable[[str], Path]) -> None:
    one, three = load(tiny_folder(family)), load(tiny_folder(family), "cpu+cpu+cpu")
    prompts = [ids.tolist() for ids in documents()]
    settings = GenerationConfig(max_new_tokens=8, temperature=0.7, batch_size=2)
    assert three.generate(prompts, settings, seeds=[1, 2, 3]) == one.generate(prompts, settings, seeds=[1, 2, 3])
    ids_BT = torch.tensor(prompts[:1])
    found, wanted = (target.forward(ids_BT, target.new_cache(), tap_layers=TAPS) for target in (three, one))
    assert torch.equal(found.logits, wanted.logits)
    assert torch.equal(found.features, wanted.features)


def test_while_one_batch_is_at_the_second_stage_another_is_at_the_first(tiny_folder: Callable[[str], Path]) -> None:
    """Each of two batches waits, in its stage, for the other to be in the other stage: without overlap neither goes on."""
    target = load(tiny_folder("llama"), TWO)
    wanted = [target.packed_hidden_states(documents(seed=seed), TAPS) for seed in (0, 1)]
    first_at_second_stage, second_at_first_stage = threading.Event(), threading.Event()
    order: list[int] = []
    me = threading.local()

    def at(stage: int) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, _arguments: object) -> None:
            if stage == 0:
                order.append(me.number)
            first = me.number == order[0]
            if first and stage == 1:
                first_at_second_stage.set()
                assert second_at_first_stage.wait(PATIENCE_S), "no other batch came to the first stage"
            elif not first and stage == 0:
                assert first_at_second_stage.wait(PATIENCE_S), "the first batch is not at the second stage"
                second_at_first_stage.set()

        return hook

    layers = target.decoder.layers
    layers[0].register_forward_pre_hook(at(0))
    layers[LAYERS - 1].register_forward_pre_hook(at(1))

    def run(number: int) -> torch.Tensor:
        me.number = number
        return target.packed_hidden_states(documents(seed=number), TAPS)

    with ThreadPoolExecutor(2) as threads:
        found = [future.result() for future in [threads.submit(run, number) for number in (0, 1)]]
    assert sorted(order) == [0, 1]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_stage_has_one_batch_at_a_time_and_a_batch_that_fails_leaves_its_stage(tiny_folder: Callable[[str], Path]) -> None:
    target = load(tiny_folder("llama"), TWO)
    inside, most = [0, 0], [0, 0]
    count = threading.Lock()

    def step(stage: int, by: int) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, arguments: tuple[torch.Tensor, ...], *_: object) -> None:
            with count:
                inside[stage] += by
                most[stage] = max(most[stage], inside[stage])
            if by < 0 and stage == 1 and arguments[0].shape[1] == 13:
                raise ValueError("the thirteenth")

        return hook

    layers = target.decoder.layers
    for stage, (first, last) in enumerate([(0, 1), (2, 3)]):
        layers[first].register_forward_pre_hook(step(stage, 1))
        layers[last].register_forward_hook(step(stage, -1))
    with ThreadPoolExecutor(4) as threads:
        runs = [threads.submit(target.packed_hidden_states, documents((length,)), TAPS) for length in (9, 13, 8, 7, 13, 5, 6, 4)]
    assert [type(run.exception()).__name__ for run in runs] == ["NoneType", "ValueError", *["NoneType"] * 2, "ValueError", *["NoneType"] * 3]
    assert most == [1, 1]


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRID])
def test_all_that_a_later_stage_is_given_is_on_its_device(family: str, tiny_folder: Callable[[str], Path]) -> None:
    """The second stage is on a device without values, which refuses to be mixed with the first one."""
    target = TargetModel.from_pretrained(tiny_folder(family), dtype=torch.bfloat16, device=TWO)
    (_, first), later = place(target.info, ("cpu", "cpu"))[1], torch.device("meta")
    target._stages.devices = (target.device, later)
    for layer in target.decoder.layers[first:].to(later):
        layer._forward_pre_hooks.clear()  # they know the devices as they were
        layer.register_forward_pre_hook(target._stages._enter(1), with_kwargs=True)
    if target.packs:
        features_TF = target.packed_hidden_states(documents((12, 5)), TAPS)
        assert features_TF.shape == (17, 3 * target.info.hidden_size)
    else:
        features_TF = target.hidden_states(torch.stack(documents((12, 12))).long(), None, TAPS)
    assert features_TF.is_meta


def test_layers_are_divided_by_their_weights(tiny_folder: Callable[[str], Path]) -> None:
    info = read_target_info(tiny_folder("llama"))
    device_map, first_layers = place(info, ("cuda:0", "cuda:1"))
    assert first_layers == (0, 2)
    assert device_map == {
        "": "cuda:0", "model.norm": "cuda:1", "lm_head": "cuda:1",
        "model.layers.0": "cuda:0", "model.layers.1": "cuda:0", "model.layers.2": "cuda:1", "model.layers.3": "cuda:1",
    }  # fmt: skip
    assert place(read_target_info(tiny_folder("qwen2")), ("cuda:0", "cuda:1"))[0]["lm_head"] == "cuda:0"  # where the embedding is
    with pytest.raises(TargetError, match="has 4 layers, which cannot be spread over 5 devices"):
        place(info, ["cpu"] * 5)


def test_a_run_extracts_from_a_spread_target_in_as_many_threads_as_it_has_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, written = write_tiny_run(tmp_path), {}
    threads: set[str] = set()
    original = Stages.batch

    def noted(self: Stages) -> AbstractContextManager[None]:
        threads.add(threading.current_thread().name)
        return original(self)

    monkeypatch.setattr(Stages, "batch", noted)
    for device in ("cpu", TWO):
        plan = Plan(load_config(path, [f"target.device={device}", f"run.workspace={tmp_path / device}", "run.seed=1"]))
        for name in ("target", "responses", "samples", "shards"):
            run_stage(plan, name)
        written[device] = {name: content for name, content in contents(plan.folder("shards")).items() if name != "manifest.json"}
    assert written["cpu"] == written[TWO]
    assert len({name for name in threads if name.startswith("target")}) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("target.device=cpu+cuda:0", "target.device = 'cpu+cuda:0': mixes cpu and cuda"),
        ("extraction.devices=['cuda:0+cuda:0']", "extraction.devices.0 = 'cuda:0+cuda:0': names a GPU twice"),
        ("training.evaluation.device=cpu+cpu", "training.evaluation.device"),  # what decodes beside the training is on one device
        ("target.device=cuda+cuda", "target.device"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_its_name(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(write_tiny_run(tmp_path), [override])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.data())
def test_no_other_division_has_a_smaller_largest_part(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    others = data.draw(st.lists(st.integers(1, len(sizes) - 1), min_size=parts - 1, max_size=parts - 1, unique=True)) if parts > 1 else []

    def largest(begins: tuple[int, ...]) -> int:
        return max(sum(sizes[begin:end]) for begin, end in zip(begins, [*begins[1:], len(sizes)], strict=True))

    found = divide(sizes, parts)
    assert found[0] == 0
    assert sorted(set(found)) == list(found)
    assert len(found) == parts
    assert largest(found) <= largest((0, *sorted(others)))


def test_hooks_that_are_bound_to_modules_are_taken_off(tiny_folder: Callable[[str], Path]) -> None:
    from accelerate import dispatch_model

    target = load(tiny_folder("llama"))
    dispatch_model(target._model, {"": "cpu"}, force_hooks=True)
    assert any(hasattr(module, "_hf_hook") for module in target._model.modules())
    assert not any(hasattr(module, "_hf_hook") for module in without_hooks(target._model).modules())
