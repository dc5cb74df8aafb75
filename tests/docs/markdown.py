"""README and documentation as the tests read them: pages, fenced blocks, commands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: ``where`` it is for messages, its language, its text."""

    where: str
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """One command a line, without comments; lines that end in a backslash go on."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [command for line in lines if (command := re.sub(r"(^|\s)#.*", "", line).strip())]


def blocks(*languages: str) -> list[Block]:
    """All blocks in these languages, in the order of ``PAGES``."""
    return [
        Block(f"{page.relative_to(ROOT)}:{page.read_text(encoding='utf-8')[: match.start()].count(chr(10)) + 1}", match[1], match[2])
        for page in PAGES
        for match in _FENCE.finditer(page.read_text(encoding="utf-8"))
        if match[1] in languages
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))
