"""Prompts that are answered by servers: what the tests of endpoints have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_core.data import build_responses, read_responses
from dflash_core.data.endpoint import EndpointClient
from tests.data import tiny
from tests.data.stand_in import StandIn
from tests.data.tiny import make_config, make_tokenizer

TOKENIZER = make_tokenizer(tiny.CHATML)


def echo(body: dict[str, Any]) -> dict[str, Any]:
    """Depends on all that was said before."""
    said = " / ".join(message["content"] for message in body["messages"])
    return {"content": f"hello {said[-20:]}", "finish_reason": "length" if "long" in body["messages"][-1]["content"] else "stop"}


def rows_of(count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"c{i}",
            "messages": [{"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": "old"}, {"role": "user", "content": "And?"}],
        }
        if i % 3 == 0
        else {"id": f"c{i}", "prompt": f"Q{i}{' long' if i % 5 == 0 else ''}"}
        for i in range(count)
    ]


def build(folder: Path, rows: list[dict[str, Any]], *servers: StandIn | dict[str, Any], **changes: Any) -> dict[str, int]:
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    endpoints = [{"url": item.url, "concurrency": 4} if isinstance(item, StandIn) else item for item in servers]
    generation = {"max_new_tokens": 40, "retries": 4, "endpoints": endpoints, **changes.pop("generation", {})}
    config = make_config(str(source), generation=generation, **changes)
    with EndpointClient(config.data.generation, "served", config.data.template_arguments) as client:
        return build_responses(config, TOKENIZER, client, folder, target_digest="target")


def said(folder: Path) -> list[list[str]]:
    return [[message.content for message in answered.conversation.messages] for answered in read_responses(folder)]
