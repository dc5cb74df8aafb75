"""From a YAML file and ``--set`` to checked settings; what is wrong with them becomes problems with field path, value and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from dflash_core.config_section import Section, holds_password
from dflash_core.errors import ConfigError, Problem

Config = TypeVar("Config", bound=Section)


def read_tree(model: type[Section], path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The mapping in a YAML file, overrides applied, to be checked as a ``model``. Raises ``ConfigError``: no such file, not YAML, no mapping."""
    source = str(path)
    try:
        tree = _yaml().load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(source, [Problem("(file)", source, "there is no such file", _remedy_for_path(Path(path)))]) from error
    except IsADirectoryError as error:
        raise ConfigError(source, [Problem("(file)", source, "is a folder", "Name a YAML file")]) from error
    except OSError as error:
        raise ConfigError(source, [Problem("(file)", source, f"cannot be read: {error.strerror}", "Make it readable")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(source, [Problem("(file)", source, f"is not text in UTF-8: {error}", "Name a YAML file")]) from error
    except YAMLError as error:
        raise ConfigError(source, [Problem("(file)", source, f"is not valid YAML: {error}", "Correct the line it names")]) from error
    if not isinstance(tree, dict):
        raise ConfigError(source, [Problem("(file)", tree, "must be a mapping of sections", f"Start with one of: {', '.join(model.model_fields)}")])
    for override in overrides:
        _apply_override(tree, override)
    return tree


def _remedy_for_path(path: Path) -> str:
    """A file of nearly the same name beside it, or else where relative paths begin."""
    there = [str(item) for item in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(str(path), there, n=1)
    return f"Did you mean {close[0]}?" if close else f"Name a YAML file (the working folder is {Path.cwd()})"


def parse_as(model: type[Config], tree: Mapping[str, Any], source: str = "config") -> Config:
    """Check a nested mapping as one kind of configuration. Raises ``ConfigError``: for each wrong setting field path, value and remedy."""
    if broken := [(path, text) for path, text in texts_of(tree) if not _is_unicode(text)]:
        message, remedy = "holds half of a surrogate pair, or bytes that are not UTF-8", "Write the character whole; file names must be UTF-8 too"
        raise ConfigError(source, [Problem(ascii(path)[1:-1], _without_secrets(path.split("."), text), message, remedy) for path, text in broken])
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(source, list(_problems(error, model))) from error


def texts_of(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a tree, names of settings too, with its field path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            below = f"{path}.{name}" if path else str(name)
            yield below, str(name)
            yield from texts_of(item, below)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from texts_of(item, f"{path}.{index}")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _yaml() -> YAML:
    return YAML(typ="safe", pure=True)  # YAML 1.2: 'on' and 'off' are words, 1e-3 is a number, repeated keys are errors


def _apply_override(tree: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError("--set", [Problem(override, text, "is not of the form a.b=value", "Write for example training.max_steps=50")])
    try:
        value = _yaml().load(text)
    except YAMLError as error:
        raise ConfigError("--set", [Problem(path, text, "is not a YAML value", "Quote the value")]) from error
    node: Any = tree
    for depth, key in enumerate(keys):
        place: Any = key
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                here = ".".join(keys[:depth])
                remedy = f"Use an index from 0 to {len(node) - 1}" if node else f"Set the whole list: {here}=[…]"
                raise ConfigError("--set", [Problem(path, value, f"{here} is a list of {len(node)}", remedy)])
            place = int(key)
        if depth == len(keys) - 1:
            node[place] = value
            return
        child = node[place] if isinstance(node, list) else node.get(place)
        if not isinstance(child, dict | list):
            node[place] = {}
        node = node[place]


def _problems(error: ValidationError, model: type[Section]) -> Iterator[Problem]:
    items = error.errors()
    for item in items:
        if item["type"] == "cross_field":
            yield from item["ctx"]["problems"]
            continue
        depth = len(item["loc"])
        if item["type"] == "too_short" and any(len(other["loc"]) > depth and other["loc"][:depth] == item["loc"] for other in items):
            continue  # only short of the items that are refused themselves
        location = [part for part in item["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
        path = ".".join(str(part) for part in location)
        value = None if item["type"] == "missing" else _without_secrets(location, item["input"])
        yield Problem(path, value, _message(item), _remedy(model, location, item))


def _without_secrets(location: Sequence[str | int], value: Any) -> Any:
    secret = location[-1:] in (["url"], ["api_key_env"]) or (isinstance(value, str) and holds_password(value))
    return "(not shown: it may hold a secret)" if secret else value


def _message(item: Mapping[str, Any]) -> str:
    messages = {"missing": "is required", "extra_forbidden": "is not a known setting"}
    said = item["msg"].removeprefix("Value error, ")
    return messages.get(item["type"], (said[:1].lower() + said[1:]).replace("tuple", "list"))  # as YAML calls it


def _remedy(model: type[Section], location: Sequence[str | int], item: Mapping[str, Any]) -> str:
    if item["type"] == "extra_forbidden":
        parent = _field_model(model, location[:-1])
        known = list(parent.model_fields) if parent else []
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        return f"Did you mean '{close[0]}'?" if close else f"Known here: {', '.join(known)}"
    parent = _field_model(model, location[:-1])
    field = parent.model_fields.get(str(location[-1])) if parent else None
    meaning = f"Meaning: {field.description}" if field and field.description else "Correct the value"
    return f"Add it. {meaning}" if item["type"] == "missing" else meaning


def _field_model(model: type[Section], location: Sequence[str | int]) -> type[Section] | None:
    """The section class at a location below ``model``, or None where the location leads elsewhere."""
    for part in location:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        section = section_in(field.annotation) if field else None
        if section is None:
            return None
        model = section
    return model


def section_in(annotation: Any) -> type[Section] | None:
    """The section class that a field's annotation holds, at any depth; None where it holds plain values."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for argument in get_args(annotation) if (found := section_in(argument))), None)
