"""Every file of configs/valid is accepted and every file of configs/invalid is refused for the reason it names.

An invalid file begins with ``# expect: field path | value | part of the message or the remedy`` (``*``: any value).
Rules that need a target, files or data are checked against a target of 8 layers with 1000 tokens and data for 40 steps.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from pydantic import ValidationError

from dflash_core.checks import advice, check_environment, check_schedule, check_target
from dflash_core.config import PipelineConfig, annotated_yaml, load_config, parse_config
from dflash_core.errors import ConfigError
from dflash_core.retrain import load_any_config
from dflash_core.target import TargetInfo

CONFIGS = Path(__file__).parent.parent / "configs"
VALID = sorted((CONFIGS / "valid").glob("*.yaml"))
INVALID = sorted((CONFIGS / "invalid").glob("*.yaml"))
SHIPPED = sorted(CONFIGS.glob("*.yaml"))


@functools.cache
def plain_folder() -> TemporaryDirectory[str]:
    """A target's folder which says nothing of how its weights are stored; gone when the tests have ended."""
    folder = TemporaryDirectory()
    Path(folder.name, "config.json").write_text("{}")
    return folder


def target_info() -> TargetInfo:
    """A target with what the rules ask about; the rest is empty."""
    known = {
        "path": plain_folder().name,
        "num_layers": 8, "vocab_size": 1000, "eos_token_ids": (2, 3), "pad_token_id": 0, "bos_token_id": 1, "max_position_embeddings": 8192,
        "num_kv_heads": 2, "head_dim": 64, "num_heads": 4, "hidden_size": 256, "intermediate_size": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    return TargetInfo(**{field.name: known.get(field.name) for field in dataclasses.fields(TargetInfo)})  # type: ignore[arg-type]


def load_and_check(path: Path) -> PipelineConfig:
    config = load_config(path)
    check_environment(config, str(path))
    check_target(config, target_info(), str(path))
    check_schedule(config, 40, str(path))
    return config


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_valid_config_is_accepted(path: Path) -> None:
    load_and_check(path)


def test_a_window_that_no_sample_reaches_is_told() -> None:
    path = CONFIGS / "valid" / "sliding-window.yaml"
    assert not [sentence for sentence in advice(load_config(path)) if "window" in sentence]
    (told,) = (sentence for sentence in advice(load_config(path, ["drafter.sliding_window=3072"])) if "window" in sentence)
    assert "no sample is longer (data.max_length = 3072)" in told


def test_a_teacher_that_live_targets_do_not_use_is_told() -> None:
    online = ["training.feed=online", "extraction.feature_dtype=bfloat16"]
    (told,) = (sentence for sentence in advice(load_config(SHIPPED[0], [*online, "extraction.teacher=topk"])) if "teacher" in sentence)
    assert "extraction.teacher = topk is of no use with training.feed = online" in told
    assert not [sentence for sentence in advice(load_config(SHIPPED[0], online)) if "teacher" in sentence]


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_invalid_config_is_refused_with_field_value_and_remedy(path: Path) -> None:
    where, value, remedy = (part.strip() for part in path.read_text().splitlines()[0].removeprefix("# expect:").split("|", 2))
    with pytest.raises(ConfigError) as caught:
        load_and_check(path)
    error = caught.value
    assert error.source == str(path)
    matching = [problem for problem in error.problems if problem.path == where]
    assert matching, f"no problem at {where}: {error}"
    assert value in ("*", repr(matching[0].value)), str(error)
    assert remedy in str(matching[0]), str(error)
    assert [problem.path for problem in error.problems] == [where], f"one file shows one problem: {error}"


def test_texts_that_may_hold_anything_and_files_that_are_there_are_no_placeholders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("<old>.jsonl").touch()
    names = ["data.sources=[{source: <old>.jsonl}, {source: <o*d>.jsonl}]"]
    texts = ["data.system_prompt=Answer in <b>bold</b> …", "data.filters.redact=[{pattern: '<[a-z]+>', replacement: <name>}]"]
    arguments = ["data.template_arguments={prefix: <think>}"]
    load_config(CONFIGS / "valid" / "minimal.yaml", [*names, *texts, *arguments])
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.source = '<new>': is a placeholder"):
        load_config(CONFIGS / "valid" / "minimal.yaml", ["data.sources=[{source: <new>.jsonl}]"])


@pytest.mark.parametrize("path", [*VALID, *SHIPPED], ids=lambda path: path.stem)
def test_annotated_yaml_loads_back_to_the_same_config(path: Path, tmp_path: Path) -> None:
    config = load_any_config(path)
    (tmp_path / "annotated.yaml").write_text(annotated_yaml(config))
    assert load_any_config(tmp_path / "annotated.yaml") == config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_has_every_setting_of_today_annotated(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    annotated = annotated_yaml(load_any_config(path))
    heading = lines[: len(lines) - len(annotated.splitlines())]
    assert all(line.startswith("# ") for line in heading), f"dflashctl config annotate configs/{path.name}"
    assert "".join(lines[len(heading) :]) == annotated, f"dflashctl config annotate configs/{path.name}"


def test_annotation_gives_every_key_its_meaning_type_and_default() -> None:
    text = annotated_yaml(load_config(CONFIGS / "valid" / "minimal.yaml"))
    lines = text.splitlines()
    keys = [index for index, line in enumerate(lines) if ": " in line and not line.lstrip().startswith("#")]
    assert len(keys) > 60
    assert all((lines[index - 1].lstrip().startswith("# ") and "default" in lines[index - 1]) or "required" in lines[index - 1] for index in keys)


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("training.max_steps=50", lambda config: config.training.max_steps, 50),
        ("training.learning_rate=1e-3", lambda config: config.training.learning_rate, 0.001),
        ("training.compile=off", lambda config: config.training.compile, "off"),
        ("training.devices=[cpu, cpu, cpu]", lambda config: config.training.devices, ("cpu", "cpu", "cpu")),
        ("data.sources.0.limit=5", lambda config: config.data.sources[0].limit, 5),
        ("data.sources.0={source: other.jsonl}", lambda config: config.data.sources[0].source, "other.jsonl"),
        ("data.template_arguments.enable_thinking=false", lambda config: config.data.template_arguments, {"enable_thinking": False}),
        ("data.system_prompt=null", lambda config: config.data.system_prompt, None),
        ("run.workspace=/tmp/elsewhere", lambda config: config.run.workspace, Path("/tmp/elsewhere")),
        ("data.system_prompt='a=b'", lambda config: config.data.system_prompt, "a=b"),
    ],
)
def test_override_reaches_its_setting(override: str, read: object, expected: object) -> None:
    assert read(load_config(CONFIGS / "valid" / "minimal.yaml", [override])) == expected  # type: ignore[operator]


@pytest.mark.parametrize(
    ("override", "where", "part"),
    [
        ("training.max_steps", "training.max_steps", "not of the form a.b=value"),
        ("training..epochs=2", "training..epochs=2", "not of the form a.b=value"),
        ("data.sources.7.limit=5", "data.sources.7.limit", "Use an index from 0 to 0"),
        ("data.sources.²=5", "data.sources.²", "Use an index from 0 to 0"),
        ("data.sources.0.source.name=x", "data.sources.0.source", "A .jsonl, .jsonl.gz or .parquet file"),
        ("training.epoch=2", "training.epoch", "Did you mean 'epochs'?"),
        ("training.epochs=0", "training.epochs", "Passes over the training rows"),
        ("training.betas=[0.9", "training.betas", "Quote the value"),
    ],
)
def test_wrong_override_is_refused_by_name(override: str, where: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIGS / "valid" / "minimal.yaml", [override])
    assert [problem.path for problem in caught.value.problems] == [where]
    assert part in str(caught.value)


def test_an_override_below_a_list_item_that_has_nothing_below_it_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIGS / "valid" / "minimal.yaml", ["training.devices=[cpu]", "training.devices.0.index=1"])
    assert [problem.path for problem in caught.value.problems] == ["training.devices.0"]


def test_an_override_into_an_empty_list_says_to_set_the_list() -> None:
    with pytest.raises(ConfigError, match=r"data\.sources is a list of 0\. Set the whole list: data\.sources=\[…\]"):
        load_config(CONFIGS / "valid" / "minimal.yaml", ["data.sources=[]", "data.sources.0.limit=3"])


def test_the_later_override_wins() -> None:
    config = load_config(CONFIGS / "valid" / "minimal.yaml", ["training.epochs=2", "training.epochs=3"])
    assert config.training.epochs == 3


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "many.yaml"
    path.write_text("target: {model: m, dtype: fp16}\ndata: {sources: [{source: x.jsonl}], heldout_fraction: 2}\ndrafter: {mask_token_id: -1}\n")
    with pytest.raises(ConfigError, match="3 problems") as caught:
        load_config(path)
    assert [problem.path for problem in caught.value.problems] == ["target.dtype", "data.heldout_fraction", "drafter.mask_token_id"]


def test_text_that_is_no_unicode_is_refused_wherever_it_stands() -> None:
    data = {"sources": [{"source": "x.jsonl"}], "system_prompt": "\ud800", "template_arguments": {"\udcff": "\ud800"}}
    with pytest.raises(ConfigError) as error:
        parse_config({"target": {"model": "t"}, "drafter": {"mask_token_id": 3}, "data": data})
    assert [problem.path for problem in error.value.problems] == ["data.system_prompt", *[r"data.template_arguments.\udcff"] * 2]
    str(error.value).encode()


def test_a_config_cannot_be_changed() -> None:
    config = load_config(CONFIGS / "valid" / "minimal.yaml")
    with pytest.raises(ValidationError):
        config.training.epochs = 9  # type: ignore[misc]


def test_the_digest_depends_on_every_setting_and_not_on_the_spelling_of_the_file(tmp_path: Path) -> None:
    config = load_config(CONFIGS / "valid" / "cpu-small.yaml")
    (tmp_path / "spelt.yaml").write_text(annotated_yaml(config))
    assert load_config(tmp_path / "spelt.yaml").digest == config.digest
    assert load_config(CONFIGS / "valid" / "cpu-small.yaml", ["run.seed=4"]).digest != config.digest
