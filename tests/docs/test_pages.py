"""What the pages say of files, settings, commands and messages is so."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import BaseModel
from ruamel.yaml import YAML

from benchmarks.picture import PICTURE, shown
from benchmarks.picture import main as draw_picture
from dflash_core.config import Section, load_config
from dflash_core.config_read import section_in
from dflash_core.data.rows import parse_row
from dflash_core.retrain import RetrainConfig
from dflash_core.retrain.config import load_any_config
from scripts.reference import GENERATED
from tests.docs.markdown import PAGES, ROOT, blocks, prose

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FOLDERS = ("configs", "dflash_core", "tasks", "flows", "tests", "scripts", "benchmarks", "docs")


def settings(model: type[BaseModel] = RetrainConfig, prefix: str = "") -> Iterator[str]:
    """The dotted path of every group and every setting."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if section := section_in(field.annotation):
            yield from settings(section, f"{prefix}{name}.")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_is_built_without_a_broken_link_or_anchor(site: Path) -> None:
    assert (site / "index.html").is_file()


def test_the_configuration_page_has_every_setting_with_its_meaning(site: Path) -> None:
    page = (site / "reference" / "configuration" / "index.html").read_text(encoding="utf-8")
    assert "generated:" not in page
    for path in settings():
        assert f">{path}</code>" in page, path
    for section in (Section, *Section.__subclasses__()):
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


def test_the_configuration_page_tells_defaults_and_limits() -> None:
    page = GENERATED["configuration"]()
    assert "| `training.learning_rate` | number, > 0 | `0.0006` | Peak learning rate. |" in page
    assert "| `drafter.mask_token_id` | integer, ≥ 0 | required |" in page
    assert '| `target.dtype` | `float32` or `bfloat16` | `"bfloat16"` |' in page


def test_the_command_page_has_every_command() -> None:
    page = GENERATED["commands"]()
    for command in ("run", "retrain", "plan", "validate", "evaluate", "export", "up", "down", "status", "deploy", "submit", "shards verify"):
        assert f"## `dflashctl {command}`" in page
    assert "--set" in page


@pytest.mark.parametrize("name", NAMES)
def test_files_settings_and_commands_that_a_page_names_exist(name: str) -> None:
    text = prose(ROOT / name)
    known = set(settings())
    help_of_commands = GENERATED["commands"]()
    for code in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./-]+", code):
            assert (ROOT / code).exists(), code
        match = re.match(rf"({'|'.join(RetrainConfig.model_fields)})\.[a-z_.0-9]+", code)
        if match and not match[0].endswith((".json", ".yaml")):
            path = re.sub(r"\.\d+", "", match[0])
            assert path in known, code
        if match := re.match(r"dflashctl ((?:shards |config )?[a-z]+)", code):
            assert f"## `dflashctl {match[1]}`" in help_of_commands, code


def test_links_of_the_readme_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if urllib.parse.urlsplit(link).scheme:
            continue
        assert (ROOT / path).exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings], link


def test_the_picture_of_the_real_drafter_shows_the_newest_records(tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.png"
    draw_picture(["--picture", str(drawn)])
    described, committed = (Image.open(path).info["Description"] for path in (drawn, PICTURE))
    assert json.loads(described) == json.loads(committed) == shown(), "draw it again: python -m benchmarks.picture"


@pytest.mark.parametrize("block", [block for block in blocks("yaml") if "target:" in block.text], ids=lambda block: block.where)
def test_whole_configurations_are_valid(block: object, tmp_path: Path) -> None:
    (tmp_path / "shown.yaml").write_text(block.text, encoding="utf-8")  # type: ignore[attr-defined]
    load_any_config(tmp_path / "shown.yaml")


def test_parts_of_configurations_have_known_keys_and_valid_values() -> None:
    minimal = ROOT / "configs" / "valid" / "minimal.yaml"
    for block in blocks("yaml"):
        if "target:" in block.text:
            continue
        load_config(minimal, [f"{path}={json.dumps(value)}" for path, value in _leaves(YAML(typ="safe", pure=True).load(block.text))])


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        yield from _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]


def test_rows_of_data_that_are_shown_are_read() -> None:
    rows = [line for block in blocks("json") for line in block.text.splitlines()]
    assert len(rows) >= 4
    for row in rows:
        assert parse_row(json.loads(row), "shown:1").messages[-1].content


def test_every_block_has_a_language_so_that_no_command_goes_unseen() -> None:
    assert [block.where for block in blocks("")] == []


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    spoken = "\n".join(text for folder in ("dflash_core", "tasks", "flows") for path in (ROOT / folder).rglob("*.py") for text in _texts(path))
    messages = re.findall(r"\*\*`([^`]+)`\*\*", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    assert len(messages) > 30
    for message in messages:
        for part in filter(None, (part.strip(" '") for part in message.split("…"))):
            assert part in spoken, f"{message!r}: no message of the code has {part!r}"


def _texts(path: Path) -> Iterator[str]:
    """Every piece of text of a module; a text with gaps counts as one for each piece."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_pictures_are_small_enough_for_a_repository() -> None:
    for picture in (ROOT / "docs" / "images").iterdir():
        assert picture.stat().st_size < 300_000, picture
