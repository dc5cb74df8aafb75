"""Rows in a fixed order, packed, through one bounded queue."""

from dflash_core.feed.packing import pack_rows
from dflash_core.feed.queue import Feed, FeedClosedError
from dflash_core.feed.row import Batch, Row, collate
from dflash_core.feed.source import RowSource, ShardRows, build_row, steps_available

__all__ = ["Batch", "Feed", "FeedClosedError", "Row", "RowSource", "ShardRows", "build_row", "collate", "pack_rows", "steps_available"]
