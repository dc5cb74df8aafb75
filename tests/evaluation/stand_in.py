"""A stand-in for vLLM and SGLang: their endpoints, their counters' names and text format, real decoding by a tiny target behind it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dflash_core.decoding import Generation

Answer = Callable[[list[int], int, bool], Generation]


@dataclass
class StandIn:
    """What the server does and what it has counted.

    answer:     prompt, max_tokens, ignore_eos → generation; ``accepted`` of it are the drafts' rounds
    failures:   statuses to answer the next completions with
    most:       so many completions are answered, and no more
    metrics:    False: /metrics is not there, as with SGLang unless it is asked for
    others:     tokens of somebody else, counted with every request
    """

    engine: str
    answer: Answer
    drafts: bool
    failures: list[int] = field(default_factory=list)
    most: int = 10**9
    metrics: bool = True
    others: int = 0
    model: str = "tiny"
    asked: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    drafted: int = 0
    begun: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)
    stale: str | None = None

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.asked.append(body)
            self.stale = self.exposition()  # the counters follow an interval of logging later
            done = self.answer(body["prompt"], body["max_tokens"], body["ignore_eos"])
            self.tokens += len(done.tokens) + self.others
            self.accepted += done.accepted
            self.drafted += sum(done.drafted)
        text = " ".join(map(str, done.tokens))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(done.tokens)}
        return {"object": "text_completion", "model": self.model, "choices": [{"index": 0, "text": text, "finish_reason": "length"}], "usage": usage}

    def exposition(self) -> str:
        """As prometheus_client writes it."""
        if self.engine == "vllm":
            labels = f'engine="0",model_name="{self.model}"'
            lines = [f"vllm:generation_tokens_total{{{labels}}} {self.tokens}.0", f"vllm:generation_tokens_created{{{labels}}} 1.7e+09"]
            if self.drafts:
                counts = {"drafts": len(self.accepted), "draft_tokens": self.drafted, "accepted_tokens": sum(self.accepted)}
                lines += [f"vllm:spec_decode_num_{name}_total{{{labels}}} {count}.0" for name, count in counts.items()]
                name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                lines += [f'{name}{{{labels},position="{k}"}} {sum(kept > k for kept in self.accepted)}.0' for k in range(3)]
        else:
            labels = f'engine_type="unified",model_name="{self.model}",tp_rank="0"'
            lines = [f'sglang:generation_tokens_total{{is_streaming="false",{labels}}} {self.tokens}.0', f"sglang:gen_throughput{{{labels}}} 12.5"]
            if self.drafts and self.accepted:
                lines.append(f"sglang:spec_verify_calls_total{{{labels}}} {len(self.accepted)}.0")
        return "# HELP x Number of things.\n# TYPE x counter\n" + "\n".join(lines) + "\n"


@contextmanager
def serving(stand_in: StandIn) -> Iterator[str]:
    """The stand-in behind a URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.reply(200, json.dumps({"object": "list", "data": [{"id": stand_in.model, "object": "model"}]}))
            elif self.path == "/metrics" and stand_in.metrics:
                with stand_in.lock:
                    text, stand_in.stale = stand_in.stale or stand_in.exposition(), None
                self.reply(200, text)
            else:
                self.reply(404, "Not Found")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with stand_in.lock:
                stand_in.begun += 1
                hangs = stand_in.begun > stand_in.most
            if hangs:
                stand_in.released.wait()
            elif stand_in.failures:
                self.reply(stand_in.failures.pop(0), json.dumps({"error": {"message": "the prompt is too long or the server is busy"}}))
            else:
                self.reply(200, json.dumps(stand_in.complete(body)))

        def reply(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        stand_in.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
