"""MkDocs hook: replaces ``<!-- generated: NAME -->`` in a page by what ``scripts/reference.py`` makes from the code.

The pages around the markers are ordinary Markdown, so that links to them work where the repository is read without the site.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # MkDocs loads this file by its path, outside any package

from scripts.reference import GENERATED

_MARKER = re.compile(r"^<!-- generated: (\S+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with the text of every page."""
    return _MARKER.sub(lambda match: GENERATED[match[1]](), markdown)
