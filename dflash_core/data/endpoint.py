"""Responses by servers with OpenAI's interface (vLLM, SGLang, `transformers serve`, …), several at a time.

    with EndpointClient(config.data.generation, "Qwen/Qwen3-8B", {"enable_thinking": False}) as client:
        future = client.submit(messages, prompt, seed)          # returns at once
        answer = future.result()

All requests run in one thread with an event loop. Every endpoint takes the next request whenever it has a slot free, so the
fast ones do more. One that fails is left alone for a while that doubles each time (with jitter, or as long as its
Retry-After says), then tried with one request at a time until it answers; its requests go to whoever is free.

What comes back is text, and the tokens are made of it again by the target's tokenizer. Text has one tokenisation but a
model may have written it in another (it may say " the" as " t", "he"): then the tokens trained on are not the ones that were
generated, though they spell the same. For greedy answers of a trained model that is rare; how often the number of tokens
differs from what the server counted is told the log. Special tokens that the server left out of its text are lost. Where the
server can tell its tokens (vLLM: ``return_token_ids``), they are taken as they are, and nothing of this applies.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast, get_args

from dflash_core.config import EndpointConfig, GenerationConfig
from dflash_core.data.attempts import asked_for, is_temporary, pause_after
from dflash_core.data.types import FinishReason, Message, Response
from dflash_core.errors import ConfigError, DFlashError, EndpointError, Problem

if TYPE_CHECKING:
    import httpx

_CONNECT_TIMEOUT_S = 20.0
_REFUSED = (400, 413, 422)  # this request, not others
_MOST_BYTES = 64 * 2**20  # of a reply: a server that never ends it must not fill the memory
KEPT = "What was answered so far is kept: start again to go on."

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """What a server said. ``counted``: the tokens it says it made; ``tokens``: which, where it can tell."""

    text: str
    finish_reason: FinishReason
    tokens: tuple[int, ...] | None
    counted: int | None


class RefusedError(DFlashError):
    """One request cannot be answered, others can."""


class _FaultError(Exception):
    """An attempt that failed and may be made again, after ``pause`` seconds if the server says so."""

    def __init__(self, reason: str, pause: float | None = None):
        super().__init__(reason)
        self.pause = pause


@dataclass
class _Job:
    body: dict[str, Any]
    prompt: Sequence[int]
    future: concurrent.futures.Future[Answer]
    faults: int = 0


@dataclass
class _Endpoint:
    """A server and how it is. ``failures`` in a row; until ``held_until`` it is left alone."""

    url: str
    model: str
    return_token_ids: bool
    concurrency: int
    key: str | None = field(repr=False)
    failures: int = 0
    failed_at: float = 0.0
    held_until: float = 0.0
    probing: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    def fail(self, begun: float, fault: _FaultError) -> None:
        """Leave it alone. Requests that were already under way when it failed tell nothing new."""
        now = time.monotonic()
        if begun >= self.failed_at:
            self.failures += 1
            pause = pause_after(self.failures, fault.pause)
            self.failed_at, self.held_until = now, now + pause
            logger.warning("%s: %s; left alone for %.1f s (failure %d in a row)", self.url, fault, pause, self.failures)


class EndpointClient:
    """Sends requests to the endpoints of a configuration until it is closed."""

    def __init__(self, generation: GenerationConfig, served_model: str, template_arguments: Mapping[str, Any]):
        """``served_model``: the name asked for where an endpoint has none of its own.

        Raises:
            ConfigError: an environment variable that holds a key is not set.
        """
        self._generation, self._template_arguments = generation, dict(template_arguments)
        self._endpoints = [_endpoint(index, item, served_model) for index, item in enumerate(generation.endpoints)]
        self._loop = asyncio.new_event_loop()
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    @property
    def concurrency(self) -> int:
        """Requests that all endpoints work on at a time."""
        return sum(endpoint.concurrency for endpoint in self._endpoints)

    def submit(self, messages: Sequence[Message], prompt: Sequence[int], seed: int) -> concurrent.futures.Future[Answer]:
        """Ask for the assistant's next turn.

        Args:
            prompt: token ids of ``messages`` by the target's own template; a server that counts others is refused.
            seed: for sampling; not sent when greedy.

        The future raises:
            RefusedError: no endpoint answers this request, or its answer cannot be used.
            EndpointError: no endpoint answers at all, or one serves something else.
        """
        job = _Job(self._body(messages, seed), prompt, concurrent.futures.Future())
        self._loop.call_soon_threadsafe(self._jobs.put_nowait, job)
        return job.future

    def __enter__(self) -> EndpointClient:
        self._main = self._loop.create_task(self._serve_all())
        threading.Thread(target=self._run, name="endpoints", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._main.cancel)  # requests under way are dropped
        with contextlib.suppress(TimeoutError):
            self._ended.result(timeout=5)  # a join on the main thread would not survive a signal

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError), contextlib.closing(self._loop):
            self._loop.run_until_complete(self._main)
        self._ended.set_result(None)

    async def _serve_all(self) -> None:
        import httpx

        connections = httpx.Limits(max_connections=None, max_keepalive_connections=self.concurrency)
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)  # of the whole request: see _ask
        async with httpx.AsyncClient(limits=connections, timeout=timeout) as http, asyncio.TaskGroup() as group:
            for endpoint in self._endpoints:
                for _ in range(endpoint.concurrency):
                    group.create_task(self._serve(http, endpoint))

    async def _serve(self, http: httpx.AsyncClient, endpoint: _Endpoint) -> None:
        while True:
            if endpoint.failures:
                async with endpoint.probing:  # one at a time, until it answers again
                    while endpoint.failures:
                        await asyncio.sleep(max(0.0, endpoint.held_until - time.monotonic()))
                        await self._attempt(http, endpoint, await self._jobs.get())
            job = await self._jobs.get()
            if endpoint.failures:
                self._jobs.put_nowait(job)  # it failed while this one waited for work
            else:
                await self._attempt(http, endpoint, job)

    async def _attempt(self, http: httpx.AsyncClient, endpoint: _Endpoint, job: _Job) -> None:
        begun, most = time.monotonic(), self._generation.retries
        try:
            answer = await self._ask(http, endpoint, job)
        except _FaultError as fault:
            endpoint.fail(begun, fault)
            job.faults += 1
            if all(item.failures > most for item in self._endpoints):
                names = ", ".join(item.url for item in self._endpoints)
                text = f"No endpoint answers ({names}): {most + 1} failures in a row, at last {fault}. Look at the servers. {KEPT}"
                job.future.set_exception(EndpointError(text))
            elif job.faults > most:
                job.future.set_exception(RefusedError(f"failed {job.faults} times, at last at {endpoint.url}: {fault}"))
            else:
                self._jobs.put_nowait(job)
        except Exception as error:
            endpoint.failures = 0
            job.future.set_exception(error)
        else:
            endpoint.failures = 0
            job.future.set_result(answer)

    async def _ask(self, http: httpx.AsyncClient, endpoint: _Endpoint, job: _Job) -> Answer:
        import httpx

        body = {"model": endpoint.model, **job.body} | ({"return_token_ids": True} if endpoint.return_token_ids else {})
        headers = {} if endpoint.key is None else {"Authorization": f"Bearer {endpoint.key}"}
        try:
            async with (
                asyncio.timeout(self._generation.request_timeout_s),
                http.stream("POST", f"{endpoint.url}/chat/completions", json=body, headers=headers) as reply,
            ):
                content = await _content(reply)
        except TimeoutError:
            raise _FaultError(f"gave no whole answer in {self._generation.request_timeout_s:g} s") from None
        except httpx.InvalidURL as error:
            raise EndpointError(f"{endpoint.url} cannot be asked: {error}. Correct data.generation.endpoints.") from None
        except httpx.HTTPError as error:
            raise _FaultError(f"{type(error).__name__}: {error}") from None
        if reply.status_code == 200:
            return _answer(endpoint, job, content)
        said = f"HTTP {reply.status_code}: {_shown(endpoint, content)}"
        if is_temporary(reply.status_code):
            raise _FaultError(said, asked_for(reply.headers.get("Retry-After")))
        if reply.status_code in _REFUSED:
            raise RefusedError(f"{endpoint.url} refuses it with {said}")
        remedy = "Check data.generation.endpoints: url (it mostly ends in /v1), model and api_key_env."
        raise EndpointError(f"{endpoint.url} answers {said}. {remedy} {KEPT}")

    def _body(self, messages: Sequence[Message], seed: int) -> dict[str, Any]:
        generation = self._generation
        body: dict[str, Any] = {
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "max_tokens": generation.max_new_tokens,
            "temperature": generation.temperature,
        }
        if generation.temperature > 0:
            body |= {"top_p": generation.top_p, "seed": seed}
            if generation.top_k:
                body["top_k"] = generation.top_k  # not OpenAI's own, but all servers of open models take it
        if self._template_arguments:
            body["chat_template_kwargs"] = self._template_arguments
        return body


def response_of(answer: Answer, tokenizer: Any, stop: int) -> Response:
    """The response in tokens: the server's own if it told them, otherwise those of the text, and ``stop`` where the turn ended.

    Raises:
        RefusedError: it has no token, or one that the tokenizer does not know.
    """
    tokens = answer.tokens
    if tokens is None:
        tokens = tuple(tokenizer(answer.text, add_special_tokens=False)["input_ids"]) if answer.text else ()
    if answer.finish_reason == "stop" and (not tokens or tokens[-1] not in {stop, *tokenizer.all_special_ids}):
        tokens = (*tokens, stop)
    if not tokens:
        raise RefusedError("was answered without a token")
    if max(tokens) >= len(tokenizer):
        raise RefusedError(f"was answered with the token {max(tokens)}, and the target's tokenizer has {len(tokenizer)}")
    return Response(tokens, answer.finish_reason)


def _endpoint(index: int, item: EndpointConfig, served_model: str) -> _Endpoint:
    key = None
    if item.api_key_env is not None:
        key = os.environ.get(item.api_key_env, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            message = "names an environment variable that is not set, or holds no key"
            problem = Problem(f"data.generation.endpoints.{index}.api_key_env", item.api_key_env, message, "Set it where the pipeline runs")
            raise ConfigError("config", [problem])
    return _Endpoint(item.url.rstrip("/"), item.model or served_model, item.return_token_ids, item.concurrency, key)


async def _content(reply: httpx.Response) -> bytes:
    content = bytearray()
    async for part in reply.aiter_bytes():
        content += part
        if len(content) > _MOST_BYTES:
            raise _FaultError(f"answers with more than {_MOST_BYTES} bytes")
    return bytes(content)


def _answer(endpoint: _Endpoint, job: _Job, content: bytes) -> Answer:
    try:
        reply = json.loads(content)
        choice = reply["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        text, usage = message.get("content") or "", reply.get("usage") or {}
        tokens, counted, prompt_tokens = choice.get("token_ids"), usage.get("completion_tokens"), usage.get("prompt_tokens")
        if not isinstance(text, str) or not isinstance(reason, str):
            raise TypeError("content or finish_reason is not text")
        if tokens is not None and not (isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)):
            raise TypeError("token_ids are not whole numbers")
        text.encode("utf-8")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise _FaultError(f"answers something else than a chat completion ({type(error).__name__}): {_shown(endpoint, content)}") from None
    _check_prompt(endpoint, job.prompt, reply.get("prompt_token_ids"), prompt_tokens)
    if endpoint.return_token_ids and tokens is None:
        raise EndpointError(f"{endpoint.url} does not tell its tokens. Set return_token_ids to false for it, or use a server that does. {KEPT}")
    if tokens is None and (message.get("reasoning_content") or message.get("reasoning")):
        remedy = "Serve without a reasoning parser, set return_token_ids for it, or turn thinking off in data.template_arguments."
        raise EndpointError(f"{endpoint.url} takes the thinking out of its answers, so the tokens cannot be made again. {remedy} {KEPT}")
    if reason not in get_args(FinishReason):
        raise RefusedError(f"{endpoint.url} ended it with finish_reason {reason!r}")
    return Answer(text, cast(FinishReason, reason), None if tokens is None else tuple(tokens), counted if isinstance(counted, int) else None)


def _check_prompt(endpoint: _Endpoint, prompt: Sequence[int], ids: object, counted: object) -> None:
    """The server must have seen the prompt that the drafter will be trained with."""
    if isinstance(ids, list) and ids != list(prompt):
        place = next((index for index, (theirs, ours) in enumerate(zip(ids, prompt, strict=False)) if theirs != ours), min(len(ids), len(prompt)))
        found = f"has other tokens in the prompt from place {place} on"
    elif isinstance(counted, int) and counted != len(prompt):
        found = f"counts {counted} tokens in a prompt"
    else:
        return
    remedy = (
        "Serve the target with its own tokenizer and chat template, and give data.template_arguments the arguments that are the server's default."
    )
    raise EndpointError(f"{endpoint.url} {found}, where the target's own chat template gives {len(prompt)}. {remedy} {KEPT}")


def _shown(endpoint: _Endpoint, content: bytes) -> str:
    """The beginning of what a server says, on one line and without its key."""
    text = content.decode("utf-8", "replace")
    text = text.replace(endpoint.key, "***") if endpoint.key else text
    return " ".join(text[:2000].split())[:200]
