"""Compile every Triton kernel for a Hopper GPU, on a machine without one, as the product's own launches ask for it.

    python -m tests.compile_kernels          # a line for each compiled kernel: name, registers, shared memory in bytes, bytes spilled

Triton brings NVIDIA's assembler along, so all but the launch happens. Launches are those of the wrappers, with the shapes of a Qwen3-8B drafter and
of SmolLM2; tensors are made, but neither filled nor computed.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from dflash_core.config import GenerationConfig
from dflash_core.drafter.attention import TILINGS, interval_mask, launch_backward, launch_forward
from dflash_core.fp8.cast_kernel import cast_triton
from dflash_core.objective.distillation import Rows
from dflash_core.objective.distillation_kernel import mixture_triton_
from dflash_core.objective.softmax import Softmax
from dflash_core.objective.softmax_kernel import hidden_gradient_triton, softmax_into_triton, softmax_triton_
from dflash_core.target.fused_kernel import norm_rope_triton_, rms_norm_triton, silu_product_triton
from dflash_core.target.sampling import launch_draw
from dflash_core.target.static_attention import launch_attend, launch_store
from dflash_core.training.adamw_kernel import adamw_, gradient_norm

HOPPER = GPUTarget("cuda", 90, 32)
_known: dict[str, Compiled] = {}  # by hash: Triton compiles a kernel once in a process


@dataclass(frozen=True)
class Compiled:
    """What the assembler says of a kernel. ``spilled``: bytes a thread writes to local memory because registers ran out."""

    name: str
    registers: int
    shared: int
    spilled: int


class _Absent:
    """A driver of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling() -> Iterator[list[Compiled]]:
    """Within the block a launch compiles its kernel and does nothing else. Gives the list of what has been compiled, each once."""
    found: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        with redirect_stdout(io.StringIO()) as told:
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in _known:
            _known[kernel.hash] = _read(self.fn.__name__, kernel, told.getvalue())
        if not any(_known[kernel.hash] is compiled for compiled in found):
            found.append(_known[kernel.hash])

    with tempfile.TemporaryDirectory() as cache:  # of kernels that are found there the assembler says nothing
        telling = mock.patch.dict(os.environ, TRITON_DUMP_PTXAS_LOG="1", TRITON_CACHE_DIR=cache)
        with telling, mock.patch.object(triton.runtime.driver, "_active", _Absent()), mock.patch.object(JITFunction, "run", compile_only):
            yield found


def _read(name: str, kernel: Any, told: str) -> Compiled:
    registers = re.search(r"Used (\d+) registers", told)
    spilled = re.search(r"(\d+) bytes spill stores", told)
    assert registers, told
    return Compiled(name, int(registers[1]), int(kernel.metadata.shared), int(spilled[1]) if spilled else 0)


def _bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def attention(A: int, G: int, D: int, *, N: int = 512, T: int = 2048, S: int = 16, window: int = 0) -> None:
    """Forward and backward of the drafter's attention, one row."""
    anchors_BN, documents_BT = torch.arange(N)[None] * (T // N), torch.zeros(1, T, dtype=torch.int32)
    mask = interval_mask(anchors_BN, documents_BT, S, window=window)
    q, dout, (kc, vc), (kb, vb) = _bf16(1, N * S, A, D), _bf16(1, N * S, A, D), _bf16(2, 1, T, G, D), _bf16(2, 1, N * S, G, D)
    out, lse = launch_forward(q, kc, vc, kb, vb, mask, TILINGS)
    launch_backward(q, kc, vc, kb, vb, out, lse, dout, mask, TILINGS)


def loss(H: int, V: int, softcap: float | None = None) -> None:
    """The kernels around the products with the head, for a head in bfloat16, one in fp8, and a teacher."""
    C = 64
    labels_C, column, hit = torch.zeros(C, dtype=torch.int64), torch.empty(C), torch.empty(C, dtype=torch.bool)
    logits_CV = _bf16(C, V)
    softmax_triton_(logits_CV, labels_C, Softmax(column, hit, column, column), softcap, want_gradient=True)
    softmax_triton_(logits_CV, labels_C, Softmax(column, hit, column, column), softcap, want_gradient=False)
    if softcap is None:
        softmax_into_triton(logits_CV.to(torch.float8_e4m3fn), logits_CV, labels_C, Softmax(column, hit, torch.ones(C), column), 256.0)
    hidden_gradient_triton(torch.empty(C, H), _bf16(V, H), labels_C, column, column, column, torch.bfloat16)
    for teacher in (logits_CV, None):
        mixture_triton_(logits_CV, teacher, labels_C, Rows(column, hit, column), 0.5, 2.0, softcap, want_gradient=True)


def optimiser() -> None:
    """Norm of the gradients and the update: in float32, in bfloat16, and in bfloat16 with gradients that were added up in float32."""
    whole, low, scalar = torch.empty(100_000), torch.empty(100_000, dtype=torch.int16), torch.empty(())
    for weight, gradient in ((whole, whole.clone()), (_bf16(100_000), _bf16(100_000)), (_bf16(100_000), whole.clone())):
        gradient_norm([gradient])
        adamw_(
            weight, None if weight is whole else low, gradient, whole.clone(), whole.clone(), scale=scalar, learning_rate=scalar, updates=scalar,
            betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0,
        )  # fmt: skip


def casts(R: int, C: int) -> None:
    """To fp8, with a scale for the whole."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        cast_triton(_bf16(R, C), dtype)


def target(H: int, A: int, G: int, D: int, V: int, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """What stands for modules of the target in extraction, its static cache, and drawing."""
    T, C = 4096, 1024
    weight, heads, angles = torch.empty(H, dtype=dtype), torch.empty(T, A, D, dtype=dtype), torch.empty(T, D, dtype=dtype)
    for round_first in (True, False):
        rms_norm_triton(torch.empty(T, H, dtype=dtype), weight, 1e-6, offset=0.0, round_first=round_first)
    norm_rope_triton_(heads, angles, angles, None)
    norm_rope_triton_(heads, angles, angles, torch.empty(D, dtype=dtype), 1e-6)
    silu_product_triton(torch.empty(T, 4 * H, dtype=dtype), torch.empty(T, 4 * H, dtype=dtype))
    all_options: dict[str, Any] = {"window": 128, "softcap": 30.0, "sinks_A": torch.empty(A, dtype=dtype)}
    for R, S, options in ((1, 1, {}), (1, 16, {}), (1, 16, all_options), (256, 1, {})):
        start_R = torch.zeros(R, dtype=torch.int32)
        keys, values = torch.empty(2, R, G, C, D, dtype=dtype)
        new = torch.empty(R, S, G, D, dtype=dtype).transpose(1, 2)
        launch_store(new, new, keys, values, start_R)
        launch_attend(torch.empty(R, S, A, D, dtype=dtype).transpose(1, 2), keys, values, start_R, scale=D**-0.5, **options)
    logits_RV = torch.empty(8, V, dtype=dtype)
    for settings in (GenerationConfig(temperature=1.0), GenerationConfig(temperature=0.7, top_k=40, top_p=0.9)):
        launch_draw(logits_RV, settings, torch.empty(8))


LAUNCHES: dict[str, Callable[[], None]] = {
    "attention of a Qwen3-8B drafter": partial(attention, 32, 8, 128),
    "attention of odd sizes with a window": partial(attention, 4, 2, 64, N=30, T=500, S=8, window=100),
    "loss over Qwen3's vocabulary": partial(loss, 4096, 151_936),
    "loss with capped logits": partial(loss, 576, 49_152, 30.0),
    "optimiser": optimiser,
    "casts": partial(casts, 4096, 12_288),
    "target like Qwen3-8B": partial(target, 4096, 32, 8, 128, 151_936),
    "target like SmolLM2 in float32": partial(target, 576, 9, 3, 64, 49_152, dtype=torch.float32),
}


def main() -> int:
    """Compile all, a line for each kernel; 1 if one spills more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most-spilled", type=int, default=10**9, metavar="BYTES", help="what a thread may spill")
    parser.add_argument("--only", help="launches whose name has this in it")
    options = parser.parse_args()
    failed = 0
    for name, launch in LAUNCHES.items():
        if options.only and options.only not in name:
            continue
        began = time.monotonic()
        with compiling() as found:
            launch()
        print(f"{name}: {len(found)} kernels, {time.monotonic() - began:.1f} s")
        for kernel in found:
            line = f"  {kernel.name:28s} {kernel.registers:4d} registers {kernel.shared:7d} bytes shared {kernel.spilled:6d} bytes spilled"
            print(line + ("  TOO MANY" if kernel.spilled > options.most_spilled else ""), flush=True)
            failed += kernel.spilled > options.most_spilled
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
