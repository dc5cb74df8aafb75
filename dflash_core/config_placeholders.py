"""Settings that were copied from a page and not filled in: ``revision: <commit>``, ``url: http://<host>:8000/v1``.

A name, a path or an address of that form is taken for what it is nearly always, unless a file is called so. Texts that may hold
anything (a system prompt, what redaction writes in place of a name) are not looked at.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dflash_core.config_read import texts_of
from dflash_core.errors import Problem

if TYPE_CHECKING:
    from dflash_core.config_section import Section

_PLACEHOLDER = re.compile(r"<[^<>\s][^<>]*>|‹[^‹›]+›|…")
_FREE_TEXT = ("data.system_prompt", "data.template_arguments", "data.drawn", "data.filters")


def placeholder_problems(config: Section) -> Iterator[Problem]:
    """Every name, path and address in a configuration that holds a placeholder. Only that is repeated: an address may hold a secret."""
    for path, text in texts_of(config.model_dump(mode="json")):
        found = None if path.startswith(_FREE_TEXT) else _PLACEHOLDER.search(text)
        if found is not None and not _is_there(text):
            message = "is a placeholder, to be replaced by something of yours"
            remedy = "Write what it stands for" + ("" if path != "target.revision" else ", a commit's hash, or leave the setting out")
            yield Problem(path, found.group(), message, remedy)


def _is_there(text: str) -> bool:
    return os.path.lexists(text) or bool(glob.glob(text))
