"""A configuration as YAML that teaches: above every key its meaning, type and default, from the model's own fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel


def annotated_yaml(config: BaseModel) -> str:
    """The whole tree as YAML with meaning, type and default of every key as comments; loads back to the same config."""
    return "\n".join(_annotated(config, 0)) + "\n"


def _annotated(section: BaseModel, depth: int) -> list[str]:
    pad = "  " * depth
    values = section.model_dump(mode="json")
    lines: list[str] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            blank = [""] if depth == 0 and lines else []
            lines += [*blank, f"{pad}# {field.description}", f"{pad}{name}:", *_annotated(value, depth + 1)]
            continue
        default = "required" if field.is_required() else f"default {json.dumps(_plain(field.get_default(call_default_factory=True)))}"
        lines.append(f"{pad}# {field.description} ({_type_name(field.annotation)}; {default})")
        lines.append(f"{pad}{name}: {json.dumps(values[name], ensure_ascii=False)}")
    return lines


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _type_name(annotation: Any) -> str:
    arguments = get_args(annotation)
    text = str(annotation)
    if text.startswith("typing.Literal"):
        return " | ".join(str(argument) for argument in arguments)
    if text.startswith("typing.Annotated"):
        return _type_name(arguments[0])
    if type(None) in arguments:
        return " | ".join(_type_name(argument) for argument in arguments if argument is not type(None)) + " | null"
    if get_origin(annotation) is tuple:
        return f"list of {_type_name(arguments[0])}"
    if get_origin(annotation) is dict:
        return "mapping"
    if isinstance(annotation, type):
        return {"str": "text", "int": "integer", "float": "number", "bool": "true | false", "PosixPath": "path", "Path": "path"}.get(
            annotation.__name__, annotation.__name__
        )
    return " | ".join(_type_name(argument) for argument in arguments) if arguments else text
