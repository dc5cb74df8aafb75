"""Counts, sizes and times as people read them, the same wherever a command speaks."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """``1.5 s``, ``42 s``, ``7 min 5 s``, ``3 h 12 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def in_bytes(count: int | None) -> str:
    """``1.2 GB``; nothing for None."""
    if count is None:
        return ""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """``1 prompt``, ``2,000 prompts``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def how_far(done: int, total: int, unit: str, remaining_s: float | None) -> str:
    """``1,200 of 5,000 tokens, 40 s left``; ``total`` 0 and ``remaining_s`` None mean unknown."""
    words = f"{done:,} of {total:,} {unit}" if total else f"{done:,} {unit}"
    return words if remaining_s is None or done >= total else f"{words}, {duration(remaining_s)} left"
