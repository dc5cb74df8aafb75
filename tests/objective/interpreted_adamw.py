"""Run in a process of its own with TRITON_INTERPRET=1: the benchmark's AdamW kernel against torch's."""

from __future__ import annotations

import torch

from benchmarks.fused_adamw import adamw_

if __name__ == "__main__":
    torch.manual_seed(0)
    betas, rate, decay = (0.9, 0.95), 1e-2, 0.1
    expected = [torch.nn.Parameter(torch.randn(shape)) for shape in ((40, 60), (7,))]
    masters = [parameter.detach().clone() for parameter in expected]
    weights = [master.bfloat16() for master in masters]
    first, second = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    updates = torch.zeros(())
    optimiser = torch.optim.AdamW(expected, lr=rate, betas=betas, weight_decay=decay)
    for step in range(4):
        gradients = [torch.randn_like(master).bfloat16() for master in masters]
        if step == 2:  # a step that is not finite changes nothing
            before = [tensor.clone() for tensor in masters + first + second]
            scale = torch.tensor(float("nan"))
        else:
            for parameter, gradient in zip(expected, gradients, strict=True):
                parameter.grad = 0.5 * gradient.float()
            optimiser.step()
            updates += 1
            scale = torch.tensor(0.5)
        adamw_(
            weights, gradients, masters, first, second,
            scale=scale, learning_rate=torch.tensor(rate), updates=updates, betas=betas, weight_decay=decay,
        )  # fmt: skip
        if step == 2:
            assert all(torch.equal(a, b) for a, b in zip(masters + first + second, before, strict=True))
        for master, weight, parameter in zip(masters, weights, expected, strict=True):
            torch.testing.assert_close(master, parameter.detach(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(weight.float(), master, rtol=8e-3, atol=1e-6)
    print("equal")
