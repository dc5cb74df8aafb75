import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.callback import callback_handler

from dflash_core.errors import LateCompilationError
from dflash_core.training.guard import CompileGuard, compiled_graphs, own_code, prepare_for_threads
from tests.waiting import PATIENCE_S


def scale(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * w).relu().sum(-1)


def shift(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x + 3 * w).sigmoid().sum(-1)


@pytest.fixture(autouse=True)
def _prepared() -> Iterator[None]:
    prepare_for_threads()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., torch.Tensor], name: str) -> Callable[..., torch.Tensor]:
    return torch.compile(own_code(function, name), fullgraph=True, dynamic=False, backend="aot_eager")


def arguments(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 8, requires_grad=True), torch.randn(8, requires_grad=True)


def in_thread(work: Callable[[], object], guard: CompileGuard, name: str = "late") -> BaseException | None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            with guard.explained():
                work()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(PATIENCE_S)
    return caught[0] if caught else None


def test_a_new_shape_is_refused_with_function_reason_shape_and_thread() -> None:
    draft = compiled(scale, "draft_of_replica_1")
    draft(*arguments()).sum().backward()
    with CompileGuard() as guard:
        error = in_thread(lambda: draft(*arguments(rows=5)), guard, "replica 1")
    assert isinstance(error, LateCompilationError)
    for part in ("draft_of_replica_1", "test_guard.py", "size mismatch at index 0. expected 4, actual 5", "float32[5, 8] on cpu", "'replica 1'"):
        assert part in str(error)


def test_a_function_that_was_never_compiled_is_refused() -> None:
    with CompileGuard() as guard:
        error = in_thread(lambda: compiled(scale, "forgotten")(*arguments()), guard)
    assert isinstance(error, LateCompilationError)
    assert "forgotten" in str(error)
    assert "not compiled in warm-up" in str(error)
    assert "float32[4, 8] on cpu, argument 1 float32[8] on cpu" in str(error)


def test_a_backward_that_did_not_run_in_warm_up_is_refused() -> None:
    loss = compiled(shift, "forward_only")(*arguments()).sum()
    with CompileGuard() as guard:
        error = in_thread(loss.backward, guard)
    assert isinstance(error, LateCompilationError)
    assert "the backward of forward_only" in str(error)
    assert "its backward did not run in warm-up" in str(error)
    assert "[4, 8]" in str(error)


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_what_compiles_while_another_veto_is_under_way_is_refused_too(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    function = compiled(shift, "second")
    loss = function(*arguments()).sum()
    counter = "_CompilationCallbackHandler__pending_callbacks_counter"  # torch counts compilations under way, and calls nobody for the second
    monkeypatch.setattr(callback_handler, counter, getattr(callback_handler, counter) + 1)
    with CompileGuard() as guard:
        late = compiled(scale, "second")
        error = in_thread(loss.backward if what == "backward" else lambda: late(*arguments()), guard)
    assert isinstance(error, LateCompilationError)
    assert "second" in str(error)
    assert len(guard.refused) == 1


def test_while_one_thread_is_refused_the_others_go_on_with_what_is_compiled() -> None:
    good, bad = compiled(scale, "good"), compiled(shift, "bad")
    for function in (good, bad):
        function(*arguments()).sum().backward()
    go_on, done = threading.Event(), []
    with CompileGuard() as guard:

        def steps() -> None:
            for step in range(60):
                x, w = arguments()
                good(x, w).sum().backward()
                torch.testing.assert_close(w.grad, torch.autograd.grad(scale(x, w).sum(), w)[0])
                done.append(step)
                if step == 10:
                    go_on.set()

        thread = threading.Thread(target=steps)
        thread.start()
        assert go_on.wait(PATIENCE_S)
        errors = [in_thread(lambda: bad(*arguments(rows=5)), guard) for _ in range(5)]
        thread.join(PATIENCE_S)
    assert len(done) == 60
    assert all(isinstance(error, LateCompilationError) for error in errors)
    assert len(guard.refused) == 5


def test_other_errors_pass_unchanged_and_afterwards_compiling_is_allowed_again() -> None:
    with CompileGuard() as guard, pytest.raises(ZeroDivisionError), guard.explained():
        _ = 1 / 0
    before = compiled_graphs()
    compiled(scale, "after")(*arguments())
    assert compiled_graphs() == before + 1


def test_each_copy_keeps_one_entry_so_that_no_lookup_among_entries_can_miss() -> None:
    copies = [own_code(scale, f"draft_of_replica_{i}") for i in range(3)]
    for i, copy in enumerate(copies):
        torch.compile(copy, fullgraph=True, dynamic=False, backend="aot_eager")(*arguments(rows=3 + i))  # another device would differ as well
    assert [len(_debug_get_cache_entry_list(copy.__code__)) for copy in copies] == [1, 1, 1]
    for rows in (3, 4):
        torch.compile(shift, fullgraph=True, dynamic=False, backend="aot_eager")(*arguments(rows))
    assert len(_debug_get_cache_entry_list(shift.__code__)) == 2  # what replicas would share without copies


def test_own_code_gives_each_copy_its_own_cache() -> None:
    first, second = own_code(scale, "first"), own_code(scale, "second")
    assert first.__code__ is not second.__code__
    assert (first.__name__, second.__name__) == ("first", "second")
    x, w = arguments()
    assert torch.equal(first(x, w), scale(x, w))
