"""Under which licence a target is given, as far as its folder says: what is made from its weights has to say it too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_core.target.info import TargetInfo

_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_LICENCE = re.compile(r"^(?:license_name|license):[ \t]*['\"]?([A-Za-z0-9][\w.+-]*)", re.MULTILINE)


def licence_of(info: TargetInfo) -> str | None:
    """The licence that the front matter of the folder's ``README.md`` names, such as "apache-2.0"; None if there is none.

    The built-in target is of that licence; its package has no such file.
    """
    from dflash_core.target.smollm2 import LICENCE, REPOSITORY

    if info.repository == REPOSITORY:
        return LICENCE
    try:
        text = (Path(info.path) / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    front = _FRONT_MATTER.match(text)
    found = _LICENCE.search(front[1]) if front else None
    return found[1] if found else None
