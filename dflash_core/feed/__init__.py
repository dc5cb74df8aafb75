"""Rows in a fixed order, packed, through one bounded queue."""

from dflash_core.feed.online import LiveSamples, TargetRows, target_loaders
from dflash_core.feed.packing import pack_rows
from dflash_core.feed.queue import Feed, FeedClosedError, Loader, loaders_of
from dflash_core.feed.row import Batch, Row, collate
from dflash_core.feed.source import PackedOrder, RowSource, ShardRows, build_row, steps_available

__all__ = [
    "Batch",
    "Feed",
    "FeedClosedError",
    "LiveSamples",
    "Loader",
    "PackedOrder",
    "Row",
    "RowSource",
    "ShardRows",
    "TargetRows",
    "build_row",
    "collate",
    "loaders_of",
    "pack_rows",
    "steps_available",
    "target_loaders",
]
