"""A stand-in for servers with OpenAI's interface: answers as scripted, keeps what it was asked, and misbehaves on demand.

with StandIn(answer) as server:
    server.faults = ["500", "hang"]        # of the requests to come, in order; then it answers
    ask(server.url)
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""(request body) → what a chat completion has beyond the usual: ``content`` and, if wanted, ``finish_reason``, ``usage``, ``message``, …"""


class StandIn(ThreadingHTTPServer):
    """Listens on a free port of this machine. ``busy``: requests that were open together, at most; those after ``most`` stay without an answer."""

    daemon_threads = True

    def __init__(self, answer: Answer, *, most: int = 10**9):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.most = answer, most
        self.faults: list[str] = []
        self.always: str | None = None
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.open = self.busy = 0
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.released = threading.Event()

    def allow(self, most: int) -> None:
        """Answer so many requests in all; those that wait for it are answered now."""
        with self.changed:
            self.most = most
            self.changed.notify_all()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *_: object) -> None:
        """A client that hung up or was killed is no news."""

    def __enter__(self) -> StandIn:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.allow(10**9)
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = cast(StandIn, self.server)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.asked.append(body)
            server.keys.append(self.headers.get("Authorization"))
            server.times.append(time.monotonic())
            server.open += 1
            server.busy = max(server.busy, server.open)
            number = len(server.asked)
            server.changed.notify_all()
            fault = server.faults.pop(0) if server.faults else server.always
        try:
            assert self.path == "/v1/chat/completions"
            with server.changed:
                server.changed.wait_for(lambda: number <= server.most)
            self._fail(server, fault) if fault else self._reply(200, _completion(server.answer(body)))
        finally:
            with server.lock:
                server.open -= 1

    def _fail(self, server: StandIn, fault: str) -> None:
        kind, _, argument = fault.partition(" ")
        if kind.isdigit():
            after = email.utils.formatdate(time.time() + 2, usegmt=True) if argument == "date" else argument
            self._reply(int(kind), {"error": {"message": f"no: {self.headers.get('Authorization')}"}}, {"Retry-After": after} if after else {})
        elif kind == "hang":
            server.released.wait()
        elif kind == "close":  # in the middle of the answer
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [{"mess')
            self.close_connection = True
        elif kind == "flood":  # an answer without an end
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            with contextlib.suppress(ConnectionError):
                while not server.released.is_set():
                    self.wfile.write(b" " * 65536)
        elif kind == "garbage":
            self._reply(200, argument)

    def _reply(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _completion(answer: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": answer["content"]}, "finish_reason": "stop"}
    choice["message"].update(answer.get("message", {}))
    choice.update({name: answer[name] for name in ("finish_reason", "token_ids") if name in answer})
    top = {name: answer[name] for name in ("usage", "prompt_token_ids") if name in answer}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **top}
