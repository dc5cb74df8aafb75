"""After warm-up nothing may compile: while a thread traces, any other thread that calls a compiled function can crash or hang.

    with CompileGuard() as guard:        # on the main thread, around the life of all workers
        ...                              # in each thread: with guard.explained(): ...

Three nets, because each has a hole. The stance ``fail_on_recompile`` refuses forward recompilations and names the guard that failed, but
lets a lazily compiled backward pass. Where torch announces a compilation of either kind to its callbacks, the guard steps in and vetoes by
raising; a callback alone would not do, because torch does not call it while another compilation, or another veto, is under way. The counters
compared at the end see what slipped through. A refused compile fails in its own thread only; calls of what was compiled in warm-up go on
working in all threads. All this is of the whole process: workers, targets and evaluators alike.

A code object with several cache entries, looked up from several threads, now and then misses an entry that fits. That cannot happen here: each
replica compiles a code object of its own (``own_code``), which so has one entry, and the lookup's move-to-front is off where torch allows.
"""

from __future__ import annotations

import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch._dynamo.utils
from torch import Tensor
from torch._dynamo.callback import CallbackTrigger, callback_handler

from dflash_core.errors import LateCompilationError

_STANCE_MESSAGE = re.compile(
    r"Detected recompile.*?filename: '(?P<file>.*?)', function name: '(?P<function>.*?)', line number: (?P<line>\d+)", re.DOTALL
)


@dataclass(frozen=True)
class RefusedCompilation:
    """One attempt to compile after warm-up.

    function: what was to be compiled, with file and line where known
    reason:   which guard failed, or that the backward or the function itself was never compiled
    shapes:   the tensors it was called with
    thread:   name of the thread that tried
    """

    function: str
    reason: str
    shapes: str
    thread: str

    def __str__(self) -> str:
        return f"{self.function} tried to compile after warm-up, in thread '{self.thread}': {self.reason}. Called with {self.shapes}."


class _VetoError(Exception):
    """Raised inside the compiler to end a compilation; Dynamo wraps it, ``explained`` unwraps it."""

    def __init__(self, refused: RefusedCompilation):
        self.refused = refused
        super().__init__(str(refused))


class CompileGuard:
    """Refuses every compilation of the process between entering and leaving. One at a time; enter and leave on the main thread."""

    def __init__(self) -> None:
        self.refused: list[RefusedCompilation] = []
        self._graphs_before = 0

    def __enter__(self) -> CompileGuard:
        self._graphs_before = compiled_graphs()
        vars(callback_handler)["install_callbacks"] = self._veto  # in the place of the method, which counts and calls only for the first
        torch.compiler.set_stance("fail_on_recompile")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None) -> None:
        torch.compiler.set_stance("default")
        del vars(callback_handler)["install_callbacks"]
        slipped = compiled_graphs() - self._graphs_before
        if slipped and error is None:
            raise LateCompilationError(f"{slipped} graphs were compiled after warm-up in spite of the guard. {_REMEDY}")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn a refused compilation of this thread into ``LateCompilationError``, with the original as its cause; other errors pass."""
        try:
            yield
        except LateCompilationError:  # of another thread, whose rows this one waited for
            raise
        except Exception as error:
            refused = self._refusal_in(error)
            if refused is None:
                raise
            raise LateCompilationError(f"{refused} {_REMEDY}") from error

    def _veto(self, trigger: CallbackTrigger, compile_id: str) -> NoReturn:
        refused = _describe_compilation(trigger, compile_id)
        self.refused.append(refused)
        raise _VetoError(refused)

    def _refusal_in(self, error: BaseException) -> RefusedCompilation | None:
        link: BaseException | None = error
        while link is not None:
            if isinstance(link, _VetoError):
                return link.refused
            if isinstance(link, RuntimeError) and (match := _STANCE_MESSAGE.search(str(link))):
                refused = _describe_recompilation(link, match)
                self.refused.append(refused)
                return refused
            link = link.__cause__ or link.__context__
        return next((refused for refused in reversed(self.refused) if str(refused) in str(error)), None)


_REMEDY = (
    "Shapes, devices, grad mode and the number of CPU threads must be those of warm-up; if this call is meant, add it to the warm-up "
    "(dflash_core.training.warming), and if it is another thread's, run it before training or after it."
)


def own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A copy of ``function`` with a code object of its own, named ``name``: compiled, it shares no cache entries with other copies."""
    code = function.__code__.replace(co_name=name)
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def prepare_for_threads() -> None:
    """Settings of torch that compiled code in several threads needs. Idempotent; call before the first compilation of warm-up."""
    switch = getattr(torch._C._dynamo.eval_frame, "_set_lru_cache", None)
    if switch is not None:  # without it the lookup reorders entries unlocked, and 0.2-0.8 % of warmed calls miss
        switch(False)


def compiled_graphs() -> int:
    """Graphs that Dynamo has compiled in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def describe_tensors(values: Mapping[str, Any]) -> str:
    """Names, dtypes, shapes and devices of the tensors among ``values``."""
    tensors = [
        f"{name} {str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
        for name, value in values.items()
        if isinstance(value, Tensor)
    ]
    return ", ".join(tensors) if tensors else "no tensors"


def _describe_recompilation(error: BaseException, match: re.Match[str]) -> RefusedCompilation:
    """From the message of the stance, which knows function and reason, and the arguments of the compiled call on the traceback."""
    failures = re.findall(r"^\s*- (?:\d+/\d+: )?(.+)$", str(error), re.MULTILINE)
    reason = "; ".join(failures) if failures else "this function was not compiled in warm-up"
    shapes, step = "unknown arguments", error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_name == "compile_wrapper":
            shapes = _describe_arguments(step.tb_frame.f_locals)
        step = step.tb_next
    return RefusedCompilation(f"{match['function']} ({match['file']}:{match['line']})", reason, shapes, threading.current_thread().name)


def _describe_compilation(trigger: CallbackTrigger, compile_id: str) -> RefusedCompilation:
    """From the stack of the thread that is about to compile: what, for a forward or for a lazy backward."""
    thread = threading.current_thread().name
    backward = trigger == CallbackTrigger.LAZY_BACKWARD
    function, shapes = f"graph {compile_id}", "unknown arguments"
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        values = frame.f_locals
        lazy = values.get("lazy_backward_info") or getattr(values.get("self"), "lazy_backward_info", None)
        graph = getattr(lazy, "bw_module", None)
        if backward and graph is not None:
            return RefusedCompilation(
                f"the backward of {_source_of(graph, function)}", "its backward did not run in warm-up", _inputs_of(graph), thread
            )
        if not backward and frame.f_code.co_name == "_compile" and isinstance(values.get("code"), types.CodeType):
            code = values["code"]
            function = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        if frame.f_code.co_name == "compile_wrapper":
            shapes = _describe_arguments(values)
            break
        frame = frame.f_back
    reason = "its backward did not run in warm-up" if backward else "this function was not compiled in warm-up, or not for these arguments"
    return RefusedCompilation(f"the backward of {function}" if backward else function, reason, shapes, thread)


def _describe_arguments(call: Mapping[str, Any]) -> str:
    positional = {f"argument {i}": value for i, value in enumerate(call.get("args", ()))}
    return describe_tensors({**positional, **call.get("kwargs", {})})


def _source_of(module: torch.fx.GraphModule, default: str) -> str:
    """The innermost user function that the graph was traced from."""
    for node in module.graph.nodes:
        places = re.findall(r'File "(.+?)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
        if places:
            file, line, function = places[0]
            return f"{function} ({file}:{line})"
    return default


def _inputs_of(module: torch.fx.GraphModule) -> str:
    return describe_tensors({node.name: node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"})
