"""From prompts to tokenised samples: readers, chat rendering, response regeneration, the sample data set."""

from dflash_core.data.prompts import read_prompts
from dflash_core.data.rejects import RejectLog
from dflash_core.data.render import render_prompt, render_sample
from dflash_core.data.responses import build_responses, read_responses, save_response_cache, write_prompts
from dflash_core.data.samples import SampleTable, write_samples
from dflash_core.data.types import Conversation, Message, Response, Sample

__all__ = [
    "Conversation",
    "Message",
    "RejectLog",
    "Response",
    "Sample",
    "SampleTable",
    "build_responses",
    "read_prompts",
    "read_responses",
    "render_prompt",
    "render_sample",
    "save_response_cache",
    "write_prompts",
    "write_samples",
]
