"""The vocabulary loss: its two products, the kernel between them, and the whole, over chunk sizes and variants.

python -m benchmarks.loss

``loss.step`` is what training calls. ``loss.float32_logits`` is the same with logits kept in float32 between the product and the softmax, and
``loss.grouped`` lets the product read the number of labelled slots on the device.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.common import SHAPES, Recorder, Shape, arguments, recorder_for, triton_runs
from dflash_core.drafter import IGNORE
from dflash_core.objective import linear_cross_entropy
from dflash_core.objective.cross_entropy import softmax_
from dflash_core.objective.reference import reference_linear_cross_entropy
from dflash_core.objective.softmax import Softmax

KERNELS = ((512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16))  # block and warps


def measure_loss(recorder: Recorder, shape: Shape) -> None:
    """All measurements of the loss at one shape."""
    device = recorder.device
    torch.manual_seed(0)
    hidden_MH = torch.randn(shape.B * shape.Q, shape.H, device=device, dtype=torch.bfloat16).requires_grad_()
    weight_VH = (0.02 * torch.randn(shape.V, shape.H, device=device)).bfloat16()
    labels_M = torch.randint(0, shape.V, (shape.B * shape.Q,), device=device)
    labels_M[:: shape.S] = IGNORE
    weights_M = torch.rand_like(labels_M, dtype=torch.float32)
    _whole(recorder, shape, hidden_MH, weight_VH, labels_M, weights_M)
    rows = hidden_MH.detach()[labels_M >= 0]
    for chunk in sorted({min(chunk, shape.labelled) for chunk in (1024, 1536, 2048, 3840, 7680)}):
        _products(recorder, shape, rows[:chunk], weight_VH)
    if triton_runs(device):
        _kernels(recorder, shape, rows[: min(2048, shape.labelled)], weight_VH, labels_M[labels_M >= 0][:2048])
    _accuracy(recorder, shape, hidden_MH, weight_VH, labels_M)


def _whole(recorder: Recorder, shape: Shape, hidden_MH: Tensor, weight_VH: Tensor, labels_M: Tensor, weights_M: Tensor) -> None:
    floor = 4 * shape.labelled * shape.H * shape.V
    for chunk in sorted({min(chunk, shape.labelled) for chunk in (shape.chunk, 960, 1920, 2048, 2560, 3840, 7680)}):

        def run(chunk: int = chunk) -> Tensor:
            losses = linear_cross_entropy(hidden_MH, weight_VH, labels_M, chunk_slots=chunk, max_labelled=shape.labelled)
            return torch.autograd.grad((losses.nll * weights_M).sum(), hidden_MH)[0]

        recorder.measure(f"loss.step.{shape.name}.chunk{chunk}", run, chunk=chunk, tflop=floor / 1e12)
    rows, labels = hidden_MH.detach()[labels_M >= 0], labels_M[labels_M >= 0]
    if recorder.device.type == "cuda":
        for chunk in (1024, 2048):
            recorder.measure(f"loss.float32_logits.{shape.name}.chunk{chunk}", partial(_float32_logits, rows, weight_VH, labels, chunk))
    recorder.measure(f"loss.grouped.{shape.name}", lambda: _grouped(rows, weight_VH, labels, min(2048, shape.labelled)))


def _float32_logits(rows: Tensor, weight_VH: Tensor, labels: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The forward pass with float32 logits; their bf16 gradient goes to a buffer of its own."""
    from dflash_core.objective.softmax_kernel import softmax_triton_

    gradient_LH = torch.empty_like(rows)
    softmax_L = Softmax.empty(labels)
    logits_CV = torch.empty(chunk, len(weight_VH), device=rows.device)
    gradient_CV = torch.empty_like(logits_CV, dtype=rows.dtype)
    for start in range(0, len(rows), chunk):
        part = slice(start, start + chunk)
        size = len(rows[part])
        torch.mm(rows[part], weight_VH.T, out_dtype=torch.float32, out=logits_CV[:size])
        softmax_triton_(logits_CV[:size], labels[part], softmax_L.rows(part), None, True, gradient_CV[:size])
        torch.mm(gradient_CV[:size], weight_VH, out=gradient_LH[part])
    return softmax_L.nll, gradient_LH


def _grouped(rows: Tensor, weight_VH: Tensor, labels: Tensor, chunk: int) -> tuple[Tensor, list[Tensor]]:
    """The forward pass with grouped products of one group, whose end is read on the device."""
    softmax_L, gradients = Softmax.empty(labels), []
    for start in range(0, len(rows), chunk):
        part = slice(start, start + chunk)
        end = torch.full((1,), len(rows[part]), dtype=torch.int32, device=rows.device)
        logits_CV = torch._grouped_mm(rows[part], weight_VH.T[None], offs=end)
        softmax_(logits_CV, labels[part], softmax_L.rows(part), None, True)
        gradients.append(torch._grouped_mm(logits_CV, weight_VH[None], offs=end))
    return softmax_L.nll, gradients


def _products(recorder: Recorder, shape: Shape, rows: Tensor, weight_VH: Tensor) -> None:
    chunk = len(rows)
    tflop = 2 * chunk * shape.H * shape.V / 1e12
    logits_CV = torch.empty(chunk, shape.V, device=rows.device, dtype=rows.dtype)
    gradient_CH = torch.empty_like(rows)
    end = torch.tensor([chunk], dtype=torch.int32, device=rows.device)
    variants = {
        "logits": lambda: torch.mm(rows, weight_VH.T, out=logits_CV),
        "logits_float32": lambda: torch.mm(rows, weight_VH.T, out_dtype=torch.float32),
        "logits_grouped": lambda: torch._grouped_mm(rows, weight_VH.T[None], offs=end),
        "gradient": lambda: torch.mm(logits_CV, weight_VH, out=gradient_CH),
        "gradient_grouped": lambda: torch._grouped_mm(logits_CV, weight_VH[None], offs=end),
    }
    for name, function in variants.items():
        if name == "logits_float32" and rows.device.type != "cuda":
            continue
        recorder.measure(f"loss.product.{name}.{shape.name}.chunk{chunk}", function, repeats=10, tflop=tflop)


def _kernels(recorder: Recorder, shape: Shape, rows: Tensor, weight_VH: Tensor, labels: Tensor) -> None:
    from dflash_core.objective.cross_entropy import _softmax_torch_
    from dflash_core.objective.softmax_kernel import softmax_triton_

    fresh_CV = torch.mm(rows, weight_VH.T)
    logits_CV, softmax_C = torch.empty_like(fresh_CV), Softmax.empty(labels)
    gigabytes = 2 * fresh_CV.nbytes / 1e9  # read once, written once

    def setup() -> None:
        logits_CV.copy_(fresh_CV)

    for block, warps in KERNELS:
        recorder.measure(
            f"loss.kernel.{shape.name}.{block}x{warps}",
            partial(softmax_triton_, logits_CV, labels, softmax_C, None, True, block=block, num_warps=warps),
            setup=setup, slots=len(rows), gigabytes=gigabytes,
        )  # fmt: skip
    compiled = torch.compile(_softmax_torch_, dynamic=False)
    recorder.measure(
        f"loss.kernel.{shape.name}.compiled_twin",
        lambda: compiled(logits_CV, labels, softmax_C, None, True),
        setup=setup,
        slots=len(rows),
        gigabytes=gigabytes,
    )
    recorder.measure(f"loss.kernel.{shape.name}.copy", lambda: logits_CV.copy_(fresh_CV), slots=len(rows), gigabytes=gigabytes)


def _accuracy(recorder: Recorder, shape: Shape, hidden_MH: Tensor, weight_VH: Tensor, labels_M: Tensor) -> None:
    """Error of the loss and of the gradient of some slots against float32 logits without chunks."""
    slots = min(256, shape.B * shape.Q)
    hidden, labels = hidden_MH.detach()[:slots].requires_grad_(), labels_M[:slots]
    exact_hidden = hidden.detach().float().requires_grad_()

    def errors() -> None:
        losses = linear_cross_entropy(hidden, weight_VH, labels, chunk_slots=shape.chunk, max_labelled=slots)
        twin = reference_linear_cross_entropy(exact_hidden, weight_VH.float(), labels)
        gradient, exact = torch.autograd.grad(losses.nll.sum(), hidden)[0], torch.autograd.grad(twin.nll.sum(), exact_hidden)[0]
        difference = (losses.nll - twin.nll).detach().abs()
        detail = {"largest": float(difference.max()), "mean_nll": float(twin.nll.detach().mean()), "hits_differ": int((losses.hit != twin.hit).sum())}
        recorder.add(f"loss.error.nll.{shape.name}", float(difference.mean()), "nat", slots, detail)
        recorder.add(f"loss.error.gradient.{shape.name}", float((gradient.float() - exact).norm() / exact.norm()), "relative", slots)

    recorder.attempt(f"loss.error.gradient.{shape.name}", errors)


if __name__ == "__main__":
    options = arguments(__doc__ or "", ["loss"]).parse_args()
    measure_loss(recorder_for(options), SHAPES[options.shape])
