"""The parts of the documentation that are made from the code: every setting, every command.

    python -m scripts.reference configuration       # prints what the page of that name is filled with

A setting or a command that is added is documented by its own description; there is nothing to keep in step by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dflash_core.config_section import LARGEST
from dflash_core.retrain import RetrainConfig

Schema = Mapping[str, Any]

_TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "null": "null", "object": "mapping"}
_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def configuration() -> str:
    """Markdown: a heading for every group of settings and a row for every setting, with its type, limits, default and meaning."""
    whole = RetrainConfig.model_json_schema()  # all of a pipeline's settings, and one group more
    return "\n".join(line for name, group in whole["properties"].items() for line in _group(name, group, whole["$defs"], name in whole["required"]))


def commands() -> str:
    """Markdown: the help of every command of ``dflashctl``, as it is printed."""
    import typer

    from flows.cli import app

    return "\n".join(line for words in _leaves(typer.main.get_command(app)) for line in _help(words))


def operations() -> str:
    """Markdown: the README's table of what is where."""
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    return readme[readme.index("| operation |") :].partition("\n\n")[0]


def _group(path: str, schema: Schema, definitions: Schema, required: bool) -> Iterator[str]:
    """A table of the settings directly in a group, then the groups within it."""
    model = definitions[schema["$ref"].rpartition("/")[2]]
    yield from ("", f"{'#' * (2 + path.count('.'))} `{path}`", "", schema["description"] + (" Required." if required else ""), "")
    yield from ("| setting | type | default | meaning |", "|---|---|---|---|")
    inner = {}
    for name, field in model["properties"].items():
        item = field.get("items", {})
        if "$ref" in field:
            inner[f"{path}.{name}"] = field
        elif "$ref" in item:
            inner[f"{path}.{name}"] = {"$ref": item["$ref"], "description": f"{field['description']} A list; each entry has these settings."}
        if "$ref" not in field:
            needed = name in model.get("required", ())
            default = "required" if needed else f"`{json.dumps(field.get('default', {}), ensure_ascii=False)}`"
            yield f"| `{path}.{name}` | {_cell(_type(field))} | {default} | {_cell(field['description'])} |"
    for below, field in inner.items():
        yield from _group(below, field, definitions, False)


def _type(field: Schema) -> str:
    """The type in words, with its limits."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(one) for one in field["anyOf"]))
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        items = field.get("items") or field["prefixItems"][0]
        return f"list of {'entries' if '$ref' in items else _type(items)}"
    name = "path" if field.get("format") == "path" else _TYPES[field["type"]]
    limits = [(sign, field[limit]) for limit, sign in _LIMITS.items() if field.get(limit, LARGEST) != LARGEST]  # which all counts have
    return ", ".join([name, *(f"{sign} {value:g}" for sign, value in limits)])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command that is not a group of commands."""
    below = getattr(group, "commands", {})
    for name, command in below.items():
        yield from _leaves(command, (*path, name))
    if not below:
        yield path


def _help(words: tuple[str, ...]) -> Iterator[str]:
    """What ``dflashctl WORDS --help`` prints, on a page of 110 columns."""
    from typer.testing import CliRunner

    from flows.cli import app

    printed = CliRunner().invoke(app, [*words, "--help"], prog_name="dflashctl", env={"TERMINAL_WIDTH": "110", "COLUMNS": "110"}).stdout
    text = "\n".join(line.rstrip() for line in printed.splitlines()).strip("\n")
    yield from ("", f"## `{' '.join(('dflashctl', *words))}`", "", "```text", text, "```")


GENERATED: dict[str, Callable[[], str]] = {"configuration": configuration, "commands": commands, "operations": operations}

if __name__ == "__main__":
    print(GENERATED[sys.argv[1]]())
