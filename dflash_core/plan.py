"""What each stage of a run depends on, where its results lie, and where it stands.

A stage's key is a digest of exactly what its result depends on: its own settings, the files it reads and the keys before
it. Its folder is named by the key, so a changed setting runs again what depends on it and nothing else, and going back to
the old setting finds the old results.

    plan = Plan(load_config("configs/demo.yaml"))
    print(plan.stage("shards").why_not)
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_core.checks import check_environment, check_target
from dflash_core.config import FilterConfig, PipelineConfig, digest_of
from dflash_core.data.builtin import versions_of
from dflash_core.data.drawn import draws
from dflash_core.data.driver import OF_ENDPOINTS, settings_of
from dflash_core.drafter import chosen_tap_layers
from dflash_core.errors import DFlashError, TargetError
from dflash_core.stages import Manifest, file_sha256
from dflash_core.target import TargetInfo, TargetModel, resolve_target
from dflash_core.target.fetch import is_path
from dflash_core.training import OPERATIONAL
from dflash_core.words import counted

STAGES = ("target", "responses", "samples", "shards", "warm_up", "train", "evaluate", "export")

# Raised by hand when a stage gives another result for the same input; results of older versions are then made again.
CODE_VERSIONS = {"target": 1, "responses": 1, "samples": 1, "shards": 2, "train": 2, "evaluate": 2, "export": 1}

TARGET = "target.json"
ONLINE = "not needed, targets feed the training"


@dataclass(frozen=True)
class StagePlan:
    """Where a stage stands. ``key`` and ``folder`` are None while something they depend on is not known yet."""

    name: str
    key: str | None
    folder: Path | None
    manifest: Manifest | None
    why_not: str | None

    @property
    def cached(self) -> bool:
        return self.manifest is not None


class Plan:
    """The stages of one configuration, looked up afresh at every question. Also holds the target while stages share it."""

    def __init__(self, config: PipelineConfig, source: str = "config"):
        """Check what can be checked before any work.

        Raises:
            ConfigError: a file, a device or a setting does not fit; names field, value and remedy.
        """
        self.config = config
        self.source = source
        self.workspace = config.run.workspace
        check_environment(config, source)
        self._info = _target_on_this_machine(config)
        if self._info is not None:
            check_target(config, self._info, source)
        self._input_digests: dict[Path, str] = {}
        self._targets: dict[tuple[torch.dtype, str], TargetModel] = {}

    @property
    def extracts(self) -> bool:
        """Whether hidden states go to disk before training; if not, there is no stage 'shards'."""
        return self.config.training.feed == "shards"

    @property
    def run_folder(self) -> Path:
        """Folder of the run: configuration, summary, report."""
        return self.workspace / "runs" / f"{self.config.run.name}-{self.config.digest[:8]}"

    @property
    def run_id(self) -> str:
        """Name of the run, with a digest of its settings."""
        return self.run_folder.name

    @property
    def info(self) -> TargetInfo:
        """What is known of the target. Raises ``TargetError`` before the stage 'target' has run."""
        if self._info is None:
            raise TargetError(f"The target {self.config.target.model} is not here yet. Run the stage 'target' first.")
        return self._info

    @property
    def knows_target(self) -> bool:
        """Whether ``info`` can be asked."""
        return self._info is not None

    def learn_target(self, info: TargetInfo) -> None:
        """Take note of the target once it is here, and check the settings against it."""
        check_target(self.config, info, self.source)
        self._info = info

    def target_model(self, dtype: str, device: str) -> TargetModel:
        """The loaded target; one at a time, shared by the stages that want the same precision and device."""
        return self.target_models(dtype, [device])[0]

    def target_models(self, dtype: str, devices: Sequence[str]) -> list[TargetModel]:
        """The target loaded on some devices; those that other stages left elsewhere or in another precision are let go."""
        wanted = [(getattr(torch, dtype), device) for device in devices]
        kept = {key: model for key, model in self._targets.items() if key in wanted}
        if len(kept) < len(self._targets):
            self._targets = kept
            gc.collect()  # decoders hold it, and themselves, until then
        for precision, device in wanted:
            if (precision, device) not in self._targets:
                trusted = self.config.target.trust_remote_code
                self._targets[precision, device] = TargetModel.from_pretrained(self.info, dtype=precision, device=device, trust_remote_code=trusted)
        return [self._targets[key] for key in wanted]

    def release_target(self) -> None:
        """Let go of the loaded target and its memory."""
        self._targets = {}

    def key(self, name: str) -> str | None:
        """Digest of everything the stage's result depends on; None while that is not known."""
        if name == "warm_up":
            return self.key("train")
        if name == "target":
            return digest_of(["target", CODE_VERSIONS["target"], self.config.target.model, self.config.target.revision])
        if self._info is None:
            return None
        depends_on: dict[str, Callable[[], dict[str, Any]]] = {
            "responses": self._responses_depends_on,
            "samples": self._samples_depends_on,
            "shards": self._shards_depends_on,
            "train": self._train_depends_on,
            "evaluate": self._evaluate_depends_on,
            "export": self._export_depends_on,
        }
        return digest_of([name, CODE_VERSIONS[name], depends_on[name]()])

    def stage(self, name: str) -> StagePlan:
        """Where a stage stands now, after looking at its files."""
        key = self.key(name)
        if key is None:
            return StagePlan(name, None, None, None, "the target has not been fetched")
        if name == "shards" and not self.extracts:
            return StagePlan(name, key, None, None, ONLINE)
        if name == "warm_up":
            reason = "not needed, training is done" if self.stage("train").cached else "runs in the process that trains, every time"
            return StagePlan(name, key, None, None, reason)
        folder = self._folder(name, key)
        manifest = Manifest.read(folder)
        if manifest is None:
            partial = folder.is_dir() and any(path.name != ".lock" for path in folder.iterdir())
            return StagePlan(name, key, folder, None, "begun, will be resumed" if partial else self._what_is_new(name, key))
        if manifest.key != key:
            return StagePlan(name, key, folder, None, "its manifest is of other settings")
        problem = manifest.problem(folder)
        if problem is None and name == "target":
            problem = self._problem_of_target(folder)
        return StagePlan(name, key, folder, None if problem else manifest, problem)

    @property
    def stages(self) -> dict[str, StagePlan]:
        """Every stage by name, in order."""
        return {name: self.stage(name) for name in STAGES}

    def folder(self, name: str) -> Path:
        """Folder of a stage. Raises ``DFlashError`` while its key is not known."""
        key = self.key(name)
        if key is None:
            raise DFlashError(f"The folder of the stage '{name}' is not known before the stage 'target' has run.")
        return self._folder(name, key)

    def _folder(self, name: str, key: str) -> Path:
        return self.workspace / "stages" / f"{name}-{key[:12]}"

    def _problem_of_target(self, folder: Path) -> str | None:
        if self._info is None:
            return "the target's files are gone"
        recorded = {"repository": self._info.repository} | json.loads((folder / TARGET).read_bytes())  # older records have none
        return None if recorded == json.loads(json.dumps(self._info.to_dict())) else "the target's files have changed"

    def _what_is_new(self, name: str, key: str) -> str:
        folders = (self.workspace / "stages").glob(f"{name}-*") if (self.workspace / "stages").is_dir() else []
        others = [folder for folder in folders if folder != self._folder(name, key)]  # its own is there as soon as it is locked
        return f"no result for these settings (results for {counted(len(others), 'other')} are kept)" if others else "never run"

    def _digest_of_input(self, path: Path) -> str:
        if path not in self._input_digests:
            self._input_digests[path] = file_sha256(path)
        return self._input_digests[path]

    def _responses_depends_on(self) -> dict[str, Any]:
        data = self.config.data
        files = {item.source: self._digest_of_input(item.path) for item in data.sources if item.path is not None}
        depends: dict[str, Any] = {
            "sources": [item.model_dump(mode="json") for item in data.sources],
            "files": files,
            "system_prompt": data.system_prompt,
            "template_arguments": data.template_arguments,
            "regenerate": data.regenerate,
            "max_rejected_fraction": data.max_rejected_fraction,
            "target": self.info.digest,
            "tokenizer": [self.info.tokenizer_digest, self.info.template_digest],
        }
        if versions := {item.source: found for item in data.sources if (found := versions_of(item.source))}:
            depends["versions"] = versions
        if drawn := draws(self.config):
            depends["drawn"] = [drawn, data.drawn.model_dump(mode="json"), self.config.run.seed, self.config.target.dtype]
        if data.filters != FilterConfig():
            depends["filters"] = data.filters.model_dump(mode="json")
        if data.regenerate != "never":
            if data.generation.endpoints:
                depends["generation"] = settings_of(data.generation)
            else:
                depends["generation"] = data.generation.model_dump(mode="json", exclude=OF_ENDPOINTS)
                depends["dtype"] = self.config.target.dtype
            if data.generation.truncated == "drop":
                depends["truncated"] = "drop"
            depends["seed"] = self.config.run.seed if data.generation.temperature > 0 else None
            depends["room"] = [data.max_length, data.min_response_tokens]  # a prompt that leaves less for a response is rejected
        if data.regenerate == "auto" and data.response_cache is not None:
            depends["response_cache"] = self._digest_of_input(data.response_cache)
        return depends

    def _samples_depends_on(self) -> dict[str, Any]:
        evaluation = self.config.evaluation
        if not evaluation.sets:
            return self._samples_of_no_set()
        # sets count as they are, whatever their names and limits
        places = [(item.source, item.split, item.subset, item.path and self._digest_of_input(item.path)) for item in evaluation.sets]
        return {**self._samples_of_no_set(), "kept_out": [self.config.data.evaluation_overlap, *sorted(set(map(str, places)))]}

    def _samples_of_no_set(self) -> dict[str, Any]:
        data = self.config.data
        return {
            "responses": self.key("responses"),
            "max_length": data.max_length,
            "min_response_tokens": data.min_response_tokens,
            "heldout_fraction": data.heldout_fraction,
        }

    def _content_of_samples(self) -> str | None:
        """Key of the samples as they are: where no prompt of an evaluation set was among them, the same as without sets.

        So a set that is named later has nothing extracted or trained again, once the stage 'samples' has found that it need not be.
        """
        key = self.key("samples")
        if key is None or not self.config.evaluation.sets:
            return key
        found = Manifest.read(self._folder("samples", key))
        unchanged = found is not None and found.key == key and found.counts.get("in_evaluation_sets") == 0
        return digest_of(["samples", CODE_VERSIONS["samples"], self._samples_of_no_set()]) if unchanged else key

    def _shards_depends_on(self) -> dict[str, Any]:
        extraction = self.config.extraction  # which devices make shards, and where they are shared, does not change them
        unused = {"none": ("teacher", "teacher_tokens"), "last_hidden": ("teacher_tokens",), "topk": ()}[extraction.teacher]
        trimmed = {"trimmed_for_window": self.config.drafter.farthest_seen} if extraction.trim else {}
        return {
            "samples": self._content_of_samples(),
            "taps": list(self.tap_layers),
            "dtype": self.config.target.dtype,
            "extraction": extraction.model_dump(mode="json", exclude={"devices", "store", "ray", "trim", *unused}) | trimmed,
        }

    def _features_depend_on(self) -> dict[str, Any]:
        if self.extracts:
            return {"shards": self.key("shards")}
        extraction = self.config.extraction.model_dump(mode="json", include={"batch_tokens", "feature_dtype"})  # all else is about disks
        return {"online": {**self._shards_depends_on(), "extraction": extraction}}

    def _train_depends_on(self) -> dict[str, Any]:
        drafter, during = self.config.drafter, self.config.training.evaluation
        start = drafter.initial_checkpoint
        depends: dict[str, Any] = {
            **self._features_depend_on(),
            "drafter": drafter.model_dump(mode="json", exclude=set() if drafter.sliding_window else {"sliding_window", "full_attention_layers"}),
            "start": self._digest_of_input(start / "model.safetensors") if start else None,
            "objective": self.config.objective.model_dump(mode="json"),
            "training": self.config.training.model_dump(mode="json", exclude=OPERATIONAL),
            "seed": self.config.run.seed,
        }
        if during.every_steps:
            depends["evaluation"] = during.model_dump(mode="json") | self.config.evaluation.model_dump(mode="json", include={"dtype", "block_size"})
        return depends

    def _evaluate_depends_on(self) -> dict[str, Any]:
        files = {item.name: self._digest_of_input(item.path) for item in self.config.evaluation.sets if item.path is not None}
        settings = self.config.evaluation.model_dump(mode="json", exclude={"served_dtype", "served_prompts"})
        depends: dict[str, Any] = {"train": self.key("train"), "evaluation": settings, "files": files}
        if (served := self.config.served_dtype) is not None:
            depends["served"] = [served, self.config.evaluation.served_prompts]
        if self.config.training.evaluation.every_steps:
            depends["keep"] = self.config.training.keep  # of the weights that training left
        return depends

    def _export_depends_on(self) -> dict[str, Any]:
        return {"evaluate": self.key("evaluate"), "target": [self.info.served_as, self.info.revision]}  # which its config.json and its card name

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """0-based target layers whose outputs are tapped."""
        return chosen_tap_layers(self.config.drafter, self.info.num_layers)


def _target_on_this_machine(config: PipelineConfig) -> TargetInfo | None:
    try:
        return resolve_target(config.target, download=False)
    except TargetError:
        if is_path(config.target.model) or Path(config.target.model).is_dir():
            raise  # nobody would fetch it: the path is wrong, or something is wrong with what is there
        return None
