"""A drafter measured where it serves: a running vLLM or SGLang, through its OpenAI-compatible API and its own counters.

    drafted = measure_server("http://gpu:8000", prompts, max_new_tokens=256, stop_ids=(2,), drafts=True)
    alone = measure_server("http://gpu:8001", prompts, max_new_tokens=256, stop_ids=(2,), drafts=False)
    result = compare_servers(drafted, alone, ours)

Prompts are sent as token ids, so that no second chat template comes between. What is sent back is counted by the server; how many drafts were
accepted is read off its Prometheus counters, before and after (vLLM: ``vllm:spec_decode_*``; SGLang: ``sglang:spec_verify_calls_total``, with
``--enable-metrics``). The counters are of the whole server: nobody else should use it meanwhile, and a note says so if somebody did.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from pydantic import BaseModel, ConfigDict

from dflash_core.data.attempts import asked_for, is_temporary, pause_after
from dflash_core.errors import EndpointError, InputError, Problem
from dflash_core.evaluation.counters import Counters, ServerAcceptance, acceptance_between, read_counters
from dflash_core.evaluation.result import EvaluationResult
from dflash_core.stages import Progress, no_progress

TRIES = 4
WARM_UP_TOKENS = 32
SETTLE_SECONDS = 5.0  # counters may lag behind the answer by an interval of logging


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerFigures(_Frozen):
    """One server on the prompts.

    engine:            "vllm", "sglang", or None if its counters cannot be read
    tokens_per_second: new tokens of all requests by the wall time of the whole measurement
    latency_seconds:   percentiles (p50, p90, p99) of whole requests
    token_seconds:     percentiles of a request's latency by its new tokens
    texts:             what was answered, in the order of the prompts
    """

    url: str
    engine: str | None
    model: str
    prompts: int
    concurrency: int
    tokens: int
    seconds: float
    tokens_per_second: float
    latency_seconds: dict[str, float]
    token_seconds: dict[str, float]
    acceptance: ServerAcceptance | None
    notes: tuple[str, ...]
    texts: tuple[str, ...]


class ServerComparison(_Frozen):
    """A server with the drafter, the same without, and our own measurement, side by side.

    speedup:   tokens per second with the drafter by those without
    same_text: share of prompts that both servers answered alike; in 16 bits a few differ by rounding
    ours:      headline figures of ``evaluation.json``, speed in the precision ``ours_dtype``
    """

    drafted: ServerFigures
    alone: ServerFigures | None
    speedup: float | None
    same_text: float | None
    ours: dict[str, float] | None
    ours_dtype: str | None


@dataclass(frozen=True)
class _Answer:
    text: str
    tokens: int
    seconds: float
    tries: int


def measure_server(
    url: str,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    drafts: bool,
    concurrency: int = 1,
    timeout_seconds: float = 300.0,
    progress: Progress = no_progress,
) -> ServerFigures:
    """Have a server answer ``prompts`` (token ids) greedily.

    Args:
        url:         where it is, with or without ``/v1``
        drafts:      whether it should be drafting; a server that does otherwise is refused after one short answer
        concurrency: requests in flight together
        timeout_seconds: for one request; unanswered ones and those refused for the moment are sent up to four times

    Raises:
        InputError: there is no prompt.
        EndpointError: it cannot be reached, refuses a request, drafts though it should not or the other way round, answers nothing, or its counters
            are no numbers; names the URL and the remedy.
    """
    if not prompts:
        raise InputError("server", [Problem("prompts", 0, "there is none to send", "Raise evaluation.num_prompts or name evaluation.sets")])
    server, stops = _Server(url, timeout_seconds), sorted(stop_ids)
    model = server.model()
    idle = server.counters(lambda _: True)
    generated = server.complete(model, prompts[0], WARM_UP_TOKENS, [], ignore_eos=True).tokens + (idle.tokens if idle else 0.0)
    before = server.counters(lambda counters: counters.tokens >= generated and (counters.rounds > 0 or not drafts))
    _check_drafting(server.url, before, drafts)
    started = time.perf_counter()
    answers: list[_Answer] = []
    with _in_threads(lambda prompt: server.complete(model, prompt, max_new_tokens, stops), prompts, concurrency) as waiting:
        for done, future in enumerate(waiting):
            progress(done, len(prompts), "prompts")
            answers.append(future.result())
    seconds = time.perf_counter() - started
    progress(len(prompts), len(prompts), "prompts")
    tokens = sum(answer.tokens for answer in answers)
    if tokens == 0:
        raise EndpointError(f"{server.url}: answered none of {len(prompts)} prompts with a single token. Look at the server's log.")
    after = server.counters(lambda counters: before is None or counters.tokens - before.tokens >= tokens)
    if before is None or after is None:
        acceptance, notes = None, ["no counters at /metrics, so acceptance is unknown (SGLang wants --enable-metrics)"]
    else:
        acceptance, notes = acceptance_between(before, after, requests=len(prompts), tokens=tokens)
    if longer := sum(answer.tokens > max_new_tokens for answer in answers):
        notes.append(f"{longer} answers are of more than {max_new_tokens} tokens, by the server's count: its speed is doubtful")
    if retried := sum(answer.tries - 1 for answer in answers):
        notes.append(f"{retried} requests had to be sent again, which the times include")
    return ServerFigures(
        url=server.url,
        engine=after.engine if after else None,
        model=model,
        prompts=len(prompts),
        concurrency=concurrency,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        latency_seconds=_percentiles([answer.seconds for answer in answers]),
        token_seconds=_percentiles([answer.seconds / max(answer.tokens, 1) for answer in answers]),
        acceptance=acceptance if drafts else None,
        notes=tuple(notes),
        texts=tuple(answer.text for answer in answers),
    )


@contextlib.contextmanager
def _in_threads(
    work: Callable[[Sequence[int]], _Answer], prompts: Sequence[Sequence[int]], concurrency: int
) -> Iterator[list[concurrent.futures.Future[_Answer]]]:
    """What will be answered to each prompt. Threads of a pool would be waited for, minutes after an interrupt; these are not."""
    futures: list[concurrent.futures.Future[_Answer]] = [concurrent.futures.Future() for _ in prompts]
    jobs: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(prompts)):
        jobs.put(index)
    left = threading.Event()

    def answer() -> None:
        with contextlib.suppress(queue.Empty):
            while not left.is_set():
                index = jobs.get_nowait()
                try:
                    futures[index].set_result(work(prompts[index]))
                except Exception as error:
                    futures[index].set_exception(error)

    for number in range(concurrency):
        threading.Thread(target=answer, name=f"request-{number}", daemon=True).start()
    try:
        yield futures
    finally:
        left.set()


def compare_servers(drafted: ServerFigures, alone: ServerFigures | None, ours: EvaluationResult | None) -> ServerComparison:
    """Put the figures side by side."""
    same = [one == other for one, other in zip(drafted.texts, alone.texts, strict=True)] if alone else []
    return ServerComparison(
        drafted=drafted,
        alone=alone,
        speedup=drafted.tokens_per_second / alone.tokens_per_second if alone else None,
        same_text=sum(same) / len(same) if same else None,
        ours=ours.headline() if ours else None,
        ours_dtype=ours.as_served.dtype if ours else None,
    )


def _check_drafting(url: str, counters: Counters | None, drafts: bool) -> None:
    if counters is None:
        return
    if drafts and not counters.rounds:
        remedy = "Start it with the command of the drafter's README.md (vLLM: --speculative-config, SGLang: --speculative-algorithm DFLASH)"
        raise EndpointError(f"{url}: expected a server that drafts, but it has verified no draft. {remedy}.")
    if not drafts and counters.rounds:
        raise EndpointError(f"{url}: expected the target alone, but this server has verified drafts. Start one without the drafter.")


def _percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{share}": float(np.percentile(values, share)) for share in (50, 90, 99)}


class _Server:
    """Requests to one server."""

    def __init__(self, url: str, timeout_seconds: float):
        self.url = url.rstrip("/").removesuffix("/v1")
        if not re.match(r"https?://[^/]", self.url):
            raise EndpointError(f"{url}: expected the address of a server, such as http://localhost:8000")
        self._timeout = timeout_seconds
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.Client(base_url=self.url, timeout=timeout_seconds, limits=unlimited, follow_redirects=True)  # vLLM: /metrics -> /metrics/

    def model(self) -> str:
        """The name of the first model served."""
        answer, _ = self._ask("/v1/models", None)
        try:
            return str(json.loads(answer)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise EndpointError(
                f"{self.url}/v1/models: expected a list of models, found {answer[:200]!r}. Is this an OpenAI-compatible server?"
            ) from error

    def complete(self, model: str, prompt: Sequence[int], max_new_tokens: int, stop_ids: list[int], *, ignore_eos: bool = False) -> _Answer:
        """Greedy, whatever the model's own generation settings are."""
        body = {
            "model": model,
            "prompt": [int(token) for token in prompt],
            "max_tokens": max_new_tokens,
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": stop_ids,
            "ignore_eos": ignore_eos,
        }
        started = time.perf_counter()
        answer, tries = self._ask("/v1/completions", body)
        seconds = time.perf_counter() - started
        try:
            fields: dict[str, Any] = json.loads(answer)
            text, tokens = fields["choices"][0]["text"], fields["usage"]["completion_tokens"]
        except (ValueError, LookupError, TypeError):
            text = tokens = None
        if not isinstance(text, str) or type(tokens) is not int or tokens < 0:
            raise EndpointError(f"{self.url}/v1/completions: expected a completion with its usage, found {answer[:200]!r}")
        return _Answer(text, tokens, seconds, tries)

    def counters(self, settled: Callable[[Counters], bool]) -> Counters | None:
        """The counters once they are ``settled``, or as they are after a few seconds; None if there are none to read."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            try:
                exposition = self._ask("/metrics", None)[0]
            except EndpointError:
                return None
            try:
                found = read_counters(exposition)
            except EndpointError as error:
                raise EndpointError(f"{self.url}{error}") from error
            if found is None or settled(found) or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def _ask(self, path: str, body: dict[str, Any] | None) -> tuple[str, int]:
        """What the server answers, and at which try."""
        for tries in range(1, TRIES + 1):
            wait = None
            try:
                reply = self._http.get(path) if body is None else self._http.post(path, json=body)
            except httpx.HTTPError as error:  # refused, timed out, cut off
                reason = f"{type(error).__name__}: {error}"
            else:
                if reply.is_success:
                    return reply.text, tries
                reason = f"status {reply.status_code}: {' '.join(reply.text[:300].split())}"
                if not is_temporary(reply.status_code):
                    raise EndpointError(f"{self.url}{path}: refused: {reason}")
                wait = asked_for(reply.headers.get("Retry-After"))
            if tries < TRIES:
                time.sleep(pause_after(tries, wait))
        raise EndpointError(f"{self.url}{path}: no answer in {TRIES} tries of up to {self._timeout:g} s: {reason}. Check that the server runs there.")
