"""Rules that need more than the settings: the target's own configuration, the files, the devices, the amount of data.

Each is checked as soon as what it needs is there, and raises ``ConfigError`` with field path, value and remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import fsspec
import torch

from dflash_core.config import PipelineConfig, devices_of
from dflash_core.config_rules import devices_of_targets
from dflash_core.data.benchmarks import BENCHMARKS
from dflash_core.data.builtin import BUILTIN_SOURCES
from dflash_core.data.drawn import draws
from dflash_core.drafter.attention import kernels_fit
from dflash_core.drafter.checkpoint import read_drafter_config
from dflash_core.drafter.config import DFlashConfig, chosen_tap_layers, mask_token_problems, tap_problems
from dflash_core.drafter.start import shape_differences
from dflash_core.errors import ConfigError, Problem
from dflash_core.target.device import total_memory
from dflash_core.target.info import TargetInfo, static_cache_bytes
from dflash_core.target.quantised import missing_packages
from dflash_core.words import counted


def check_environment(config: PipelineConfig, source: str = "config") -> None:
    """Files that are named exist and devices that are named are there. Raises ``ConfigError``."""
    _raise(source, [*_file_problems(config), *_device_problems(config)])


def check_target(config: PipelineConfig, info: TargetInfo, source: str = "config") -> None:
    """The drafter's settings fit the target, and its initial checkpoint both. Raises ``ConfigError``."""
    _raise(source, [*_target_problems(config, info), *_memory_problems(config, info)])
    _raise(source, [*_drafter_problems(config, info), *_start_problems(config, info)])


def check_schedule(config: PipelineConfig, steps_available: int, source: str = "config") -> None:
    """The data lasts for the steps that are asked for. Raises ``ConfigError``."""
    training = config.training
    if steps_available < 1:
        problem = Problem(
            "training.epochs", training.epochs,
            f"the data holds less than one step of {config.rows_per_step} rows of {training.row_length} tokens",
            "Add prompts, lower training.row_length or accumulation_steps, or raise training.epochs",
        )  # fmt: skip
        raise ConfigError(source, [problem])
    if training.max_steps is not None and training.max_steps > steps_available:
        held = f"{counted(training.epochs, 'epoch')} {'holds' if training.epochs == 1 else 'hold'} {counted(steps_available, 'step')}"
        problem = Problem(
            "training.max_steps", training.max_steps, f"the schedule is longer than the data: {held}",
            f"Set training.max_steps to at most {steps_available}, raise training.epochs, or add prompts",
        )  # fmt: skip
        raise ConfigError(source, [problem])


def _raise(source: str, problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError(source, problems)


def _file_problems(config: PipelineConfig) -> Iterator[Problem]:
    sources = {f"data.sources.{index}.source": item for index, item in enumerate(config.data.sources)}
    sets = {f"evaluation.sets.{index}.source": item for index, item in enumerate(config.evaluation.sets)}
    for path, item in {**sources, **sets}.items():
        if item.drawn and path in sets:
            yield Problem(path, item.source, "a set is the same for all drafters, and a target writes its own", "Name a file or a built-in set")
        elif item.path is not None and not item.path.is_file():
            yield Problem(path, item.source, "there is no such file", "Correct the path; it is relative to the folder you start in")
        elif item.source in BENCHMARKS and path in sources:
            yield Problem(path, item.source, "is a benchmark, which is never trained on", "Name it in evaluation.sets instead")
        elif item.source.startswith("builtin:") and item.source not in BUILTIN_SOURCES:
            yield Problem(path, item.source, "is not a built-in source", f"Use {', '.join(BUILTIN_SOURCES)}")
    cache = config.data.response_cache
    if cache is not None and not cache.is_file():
        yield Problem("data.response_cache", str(cache), "there is no such file", "Correct the path or leave it out")
    there = next(folder for folder in (config.run.workspace.absolute(), *config.run.workspace.absolute().parents) if folder.exists())
    if not there.is_dir():
        yield Problem("run.workspace", str(config.run.workspace), f"{there} is not a folder", "Name a folder; it is made where there is none")
    if config.extraction.store is not None:
        yield from _store_problems(config.extraction.store)
    yield from _ray_problems(config)
    start = config.drafter.initial_checkpoint
    if start is not None and (missing := [name for name in ("config.json", "model.safetensors") if not (start / name).is_file()]):
        message = f"is not a drafter folder: it has no {' and no '.join(missing)}"
        yield Problem("drafter.initial_checkpoint", str(start), message, "Name a folder that 'dflashctl export' wrote")


def _ray_problems(config: PipelineConfig) -> Iterator[Problem]:
    missing = [name for name in ("ray", "prefect_ray") if find_spec(name) is None]
    if config.extraction.ray.workers and missing:
        message = f"{' and '.join(missing)} cannot be imported"
        yield Problem("extraction.ray.workers", config.extraction.ray.workers, message, "pip install 'dflash-pipeline[ray]', or set it to 0")


def _store_problems(store: str) -> Iterator[Problem]:
    try:
        fsspec.get_filesystem_class(store.partition("://")[0])
    except ImportError as error:
        yield Problem("extraction.store", store, str(error), "Install what is missing; for s3: pip install 'dflash-pipeline[s3]'")
    except ValueError as error:
        yield Problem("extraction.store", store, str(error), "Use an address that fsspec knows, such as s3://bucket/shards")


def _device_problems(config: PipelineConfig) -> Iterator[Problem]:
    named = [("target.device", config.target.device), ("evaluation.device", config.evaluation.device)]
    for field in ("devices", "target_devices"):
        named += [(f"training.{field}.{index}", device) for index, device in enumerate(getattr(config.training, field))]
    named += [(f"extraction.devices.{index}", device) for index, device in enumerate(config.extraction.devices or ())]
    if config.training.evaluation.every_steps:
        named.append(("training.evaluation.device", config.training.evaluation_device))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for path, device in [(path, part) for path, devices in named for part in devices_of(devices)]:
        kind, _, index_text = device.partition(":")
        if kind == "cuda" and int(index_text or 0) >= count:
            have = f"this machine has cuda:0 to cuda:{count - 1}" if count else "this machine has no CUDA device"
            yield Problem(path, device, f"there is no such device; {have}", "Name a device that is here; 'dflashctl doctor' lists them")
        elif (
            kind == "cuda"
            and path.startswith("training.devices")
            and config.training.precision == "fp8"
            and torch.cuda.get_device_capability(device) < (8, 9)
        ):
            yield Problem("training.precision", "fp8", f"{device} has no fp8 products", "Set training.precision to bfloat16")


def _target_problems(config: PipelineConfig, info: TargetInfo) -> Iterator[Problem]:
    drafter = config.drafter
    num_taps = drafter.num_taps or drafter.num_layers
    if drafter.tap_layers is None and num_taps > max(1, info.num_layers - 3):
        field = "drafter.num_taps" if drafter.num_taps else "drafter.num_layers"
        yield Problem(field, num_taps, f"more taps than the target's {info.num_layers} layers can give", "Lower drafter.num_taps")
    else:
        yield from tap_problems(chosen_tap_layers(drafter, info.num_layers), info)
    for path, device in devices_of_targets(config):
        if len(devices_of(device)) > info.num_layers:
            message = f"{info.name} has {info.num_layers} layers, which cannot be spread over {len(devices_of(device))} devices"
            yield Problem(path, device, message, "Name fewer devices")
    yield from mask_token_problems(drafter.mask_token_id, info)
    yield from _quantisation_problems(config, info)
    if config.extraction.teacher == "topk" and config.extraction.teacher_tokens > info.vocab_size:
        message = f"more than the {info.vocab_size} tokens of the target's vocabulary"
        yield Problem("extraction.teacher_tokens", config.extraction.teacher_tokens, message, "Lower it; 32 hold nearly all of the probability")
    precision = config.training.precision
    if precision == "fp8":
        sizes = {
            "hidden": info.hidden_size,
            "MLP": info.intermediate_size,
            "key/value": info.num_kv_heads * info.head_dim,
            "vocabulary": info.vocab_size,
        }
        if odd := [f"a {name} size of {size}" for name, size in sizes.items() if size % 16]:
            yield Problem(
                "training.precision",
                "fp8",
                f"its products want multiples of 16; the target has {' and '.join(odd)}",
                "Set training.precision to bfloat16",
            )
        if info.logit_softcap is not None:
            message = f"the target caps its logits (at {info.logit_softcap}), which the head in fp8 does not do"
            yield Problem("training.precision", "fp8", message, "Set training.precision to bfloat16")
    if config.training.attention == "fused" and not kernels_fit(drafter.block_size, info.head_dim, precision):
        yield Problem(
            "training.attention", "fused",
            "the kernels take bfloat16, heads of 64 or 128 and blocks that divide 64; "
            f"here are {precision}, heads of {info.head_dim} and blocks of {drafter.block_size}",
            "Set training.attention to auto or flex",
        )  # fmt: skip
    if config.data.max_length > info.max_position_embeddings:
        yield Problem(
            "data.max_length", config.data.max_length, f"longer than the target's {info.max_position_embeddings} positions", "Lower data.max_length"
        )


def _memory_problems(config: PipelineConfig, info: TargetInfo) -> Iterator[Problem]:
    """Keys and values that are larger than the memory of their devices even after prompts of no length."""
    evaluation, during = config.evaluation, config.training.evaluation
    size_of, positions = {"float32": 4, "bfloat16": 2}, info.max_position_embeddings
    of_ways = size_of[config.served_dtype or evaluation.dtype]
    sized: list[tuple[str, int, int, int, int, str]] = [
        (f"evaluation.batch_sizes.{index}", rows, rows, min(evaluation.max_new_tokens, positions), of_ways, evaluation.device)
        for index, rows in enumerate(evaluation.batch_sizes)
    ]
    if during.every_steps:
        tokens, device = during.max_new_tokens, config.training.evaluation_device
        sized.append(("training.evaluation.max_new_tokens", tokens, 1, min(tokens, positions), size_of[evaluation.dtype], device))
    data, itemsize = config.data, size_of[config.target.dtype]
    generated = {"data.generation": data.generation.max_new_tokens} if data.regenerate != "never" and not data.generation.endpoints else {}
    generated |= {"data.drawn": data.drawn.max_new_tokens} if draws(config) else {}
    sized += [(f"{section}.max_new_tokens", tokens, 1, tokens, itemsize, config.target.device) for section, tokens in generated.items()]
    for field, value, rows, positions, size, device in sized:
        wanted = static_cache_bytes(info, rows, positions, size)
        there = sum(map(total_memory, devices_of(device)))
        if wanted > there:
            message = f"keys and values of {rows} x {positions:,} positions take {wanted / 2**30:,.0f} GiB, and {device} has {there / 2**30:,.0f} GiB"
            yield Problem(field, value, message, "Lower it" if field.endswith("max_new_tokens") else "Lower it or evaluation.max_new_tokens")


def _quantisation_problems(config: PipelineConfig, info: TargetInfo) -> Iterator[Problem]:
    method = info.quantisation
    if method is None:
        return
    named = devices_of_targets(config)
    if config.training.evaluation.every_steps:
        named.append(("training.evaluation.device", config.training.evaluation_device))
    for field, device in named:
        if missing := missing_packages(method, devices_of(device)[0]):
            message = f"{info.name} is stored quantised ({method}), which needs {' and '.join(missing)} on this device"
            yield Problem(field, device, message, f"pip install {' '.join(missing)}, or name the unquantised model")
    if config.drafter.initial_weights == "target" and config.drafter.initial_checkpoint is None:
        message = f"the target's layers are stored quantised ({method}), and a drafter cannot begin as one of them"
        yield Problem("drafter.initial_weights", "target", message, "Set drafter.initial_weights to random")


def _drafter_problems(config: PipelineConfig, info: TargetInfo) -> Iterator[Problem]:
    """A drafter whose weights alone are larger than the memory of a device."""
    weights = DFlashConfig.from_target(info, config.drafter).num_parameters()
    if 4 * weights > (there := max(map(total_memory, config.training.devices))):
        message = f"the drafter has {weights:,} weights, {4 * weights / 2**30:,.0f} GiB in float32, and a device {there / 2**30:,.0f} GiB"
        field = "intermediate_size" if config.drafter.intermediate_size else "num_layers"
        yield Problem(f"drafter.{field}", getattr(config.drafter, field), message, "Lower drafter.num_layers or drafter.intermediate_size")


def _start_problems(config: PipelineConfig, info: TargetInfo) -> Iterator[Problem]:
    start = config.drafter.initial_checkpoint
    if start is not None:
        found = read_drafter_config(start)
        differing = shape_differences(found, DFlashConfig.from_target(info, config.drafter))
        if differing:
            message = f"the drafter there has another shape: {'; '.join(differing)}"
            yield Problem("drafter.initial_checkpoint", str(start), message, "Choose one made for this target and these settings")


def advice(config: PipelineConfig) -> list[str]:
    """What is allowed but unwise here, as sentences."""
    return [*_advice_on_precision(config), *_advice_on_window(config), *_advice_on_disk(config)]


def _advice_on_window(config: PipelineConfig) -> list[str]:
    window, longest = config.drafter.sliding_window, config.data.max_length
    if window is None or window < longest:
        return []
    return [f"drafter.sliding_window = {window}: no sample is longer (data.max_length = {longest}), so training never meets the window's end."]


def _advice_on_precision(config: PipelineConfig) -> list[str]:
    on_cpu = [
        path
        for path, device, dtype in (
            ("target.dtype", config.target.device, config.target.dtype),
            ("training.precision", config.training.devices[0], config.training.precision),
            ("evaluation.dtype", config.evaluation.device, config.evaluation.dtype),
            ("evaluation.served_dtype", config.evaluation.device, config.served_dtype),
        )
        if "cpu" in devices_of(device) and dtype == "bfloat16"
    ]
    if not on_cpu or _cpu_multiplies_bfloat16():
        return []
    return [f"{', '.join(on_cpu)} = bfloat16: this CPU has no bfloat16 instructions and takes about ten times as long as in float32."]


def _advice_on_disk(config: PipelineConfig) -> list[str]:
    extraction = config.extraction
    if config.training.feed != "online":
        return []
    is_set = {f"extraction.teacher = {extraction.teacher}": extraction.teacher != "none", "extraction.trim = true": extraction.trim}
    return [f"{setting} is of no use with training.feed = online, which stores nothing." for setting, useless in is_set.items() if useless]


def _cpu_multiplies_bfloat16() -> bool:
    flags = Path("/proc/cpuinfo")
    if not flags.is_file():
        return True  # not known, so nothing is said
    text = flags.read_text(encoding="utf-8", errors="replace")
    return any(name in text for name in ("avx512_bf16", "amx_bf16", " bf16"))
