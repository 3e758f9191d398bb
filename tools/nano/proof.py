"""The fused operators against plain ones on the GPU: outputs and gradients on random packed documents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ninfer.errors import NInferError
from tools.nano import delta, geometry
from tools.nano.model import attend_fused, attend_plain
from tools.nano.packing import Packing, packing

_LIMIT = 2e-2  # of the norm, BF16 operators against float32


def _compare(name: str, ours: list[torch.Tensor], expected: list[torch.Tensor], labels: str) -> None:
    for label, x, y in zip(labels.split(), ours, expected, strict=True):
        error = float((x.double() - y.double()).norm() / y.double().norm())
        print(f"{name:10} {label:6} {error:.2e}", flush=True)
        if not error < _LIMIT:
            raise NInferError(f"{name}: {label} differs by {error:.2e} of its norm; the limit is {_LIMIT}")


def prove_operators() -> None:
    """Print the differences. Raises NInferError if one is larger than BF16 explains."""
    ends = np.cumsum([0, 64, 1024, 192, 4096, 64, 2752])
    tokens, where = int(ends[-1]), packing(ends, "cuda")
    g = torch.Generator(device="cuda").manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cuda")

    unit = torch.nn.functional.normalize
    q, k = (unit(random(tokens, geometry.KEY_HEADS, 128), dim=-1).bfloat16() for _ in "qk")
    v = random(tokens, geometry.VALUE_HEADS, 128).bfloat16()
    decay = -torch.rand(tokens, geometry.VALUE_HEADS, generator=g, device="cuda") * 0.2
    beta = torch.rand(tokens, geometry.VALUE_HEADS, generator=g, device="cuda")
    outer = random(tokens, geometry.VALUE_HEADS, 128)
    ours = _run(delta.fused(), (q, k, v, decay, beta), where, outer)
    inputs = tuple(x.float() for x in (q, k, v, decay, beta))
    expected = _run(delta.plain, inputs, where, outer)
    _compare("delta", ours, expected, "out dq dk dv dg dbeta")
    q, k, v = (random(tokens, geometry.HEADS, geometry.HEAD_DIM).bfloat16() for _ in "qkv")
    outer = random(tokens, geometry.HEADS, geometry.HEAD_DIM)
    ours = _run(attend_fused(), (q, k, v), where, outer)
    expected = _run(attend_plain, (q.float(), k.float(), v.float()), where, outer)
    _compare("attention", ours, expected, "out dq dk dv")


def _run(
    operator: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    where: Packing,
    outer: torch.Tensor,
) -> list[torch.Tensor]:
    """The output, and the gradients of its product with `outer`."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = operator(*leaves, where)
    (output.float() * outer).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
