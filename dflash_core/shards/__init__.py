"""The dataset of hidden states on disk: format, writer, extraction, reader, verification."""

from dflash_core.shards.columns import TEACHER_COLUMNS
from dflash_core.shards.extract import extract
from dflash_core.shards.format import Column, ShardCard, expected_of
from dflash_core.shards.reader import ShardDataset, ShardSample
from dflash_core.shards.verify import verify_shards
from dflash_core.shards.writer import ShardWriter

__all__ = ["TEACHER_COLUMNS", "Column", "ShardCard", "ShardDataset", "ShardSample", "ShardWriter", "expected_of", "extract", "verify_shards"]
