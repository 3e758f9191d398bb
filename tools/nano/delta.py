"""The gated delta rule over packed documents: a plain form for the CPU, and flash-linear-attention's kernels.

Documents lie one after another on the token axis, each padded to a multiple of CHUNK, so a chunk belongs to
one document and a document's first chunk starts from a zero state. Formulas: the chunked form of Gated
DeltaNet (arXiv 2412.06464), with q and k of unit length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tools.nano.packing import CHUNK, Packing

Delta = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Packing], torch.Tensor
]


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, packing: Packing,
    rows: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Outputs `[T, Hv, D]` of unit q, k `[T, Hk, D]`, v `[T, Hv, D]`, log decays g and beta `[T, Hv]`.

    rows: equal parts of the token axis that no document crosses; they are computed side by side.
    """
    tokens, heads, width = v.shape
    repeat = heads // q.shape[1]
    q, k = (x.repeat_interleave(repeat, dim=1) for x in (q, k))
    q, k, v = (x.reshape(-1, CHUNK, heads, width).transpose(1, 2) for x in (q, k, v))  # [N, H, CHUNK, D]
    total = g.reshape(-1, CHUNK, heads).transpose(1, 2).cumsum(-1)
    weight = beta.reshape(-1, CHUNK, heads).transpose(1, 2).unsqueeze(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    solved = _inverse((weight * (k @ k.mT) * decay).tril(-1))
    since = total.exp().unsqueeze(-1)
    rest = (total[..., -1:] - total).exp().unsqueeze(-1)
    u, w = solved @ (weight * v), solved @ (weight * since * k)
    begun = (packing.chunks[:, 1] != 0).to(v.dtype).reshape(-1, 1, 1, 1)  # 0 where a document starts
    given = ((q @ k.mT) * decay, since * q, rest * k, since[..., -1:, :], u, w, begun)
    chunks = [x.unflatten(0, (rows, -1)).unbind(1) for x in given]
    state = v.new_zeros(rows, heads, width, width)
    outputs = []
    for within, asked, kept, faded, new, old, going in zip(*chunks, strict=True):
        state = going * state
        change = new - old @ state
        outputs.append(asked @ state + within @ change)
        state = faded * state + kept.mT @ change
    return torch.stack(outputs, 1).transpose(2, 3).reshape(tokens, heads, width) * width**-0.5


def _inverse(below: torch.Tensor) -> torch.Tensor:
    """Of the identity plus strictly lower triangular matrices `[..., CHUNK, CHUNK]`, by blocks of 1, 2, 4,
    ...: the lower left part of a block's inverse is that part between the inverses of its halves, negated."""
    index = torch.arange(CHUNK, device=below.device)
    found = torch.eye(CHUNK, dtype=below.dtype, device=below.device).expand_as(below)
    for size in (2**n for n in range(CHUNK.bit_length() - 1)):
        block = index // size
        corner = (block % 2 == 1).unsqueeze(1) & (block.unsqueeze(1) - 1 == block)
        found = found - found @ (below * corner) @ found
    return found


def fused() -> Delta:
    """The same through flash-linear-attention, for CUDA and BF16.

    One of its backward kernels refuses Hopper under Triton 3.4 to 3.7.0, whose compiler gets it wrong there;
    that step is computed by matrix products instead.
    """
    import fla.ops.gated_delta_rule.chunk as library  # pyright: ignore[reportMissingImports]
    from fla.ops.common import chunk_delta_h, chunk_o  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import chunk_fwd, wy_fast  # pyright: ignore[reportMissingImports]
    from fla.ops.utils import cumsum  # pyright: ignore[reportMissingImports]

    library.chunk_bwd_dqkwg = _Gradients()
    for module in (cumsum, chunk_fwd, wy_fast, chunk_delta_h, chunk_o):
        for name, kernel in vars(module).items():
            if name.endswith(_KERNELS):
                _narrow(kernel.fn)

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        packing: Packing,
    ) -> torch.Tensor:
        output, _ = library.chunk_gated_delta_rule(
            *(x.unsqueeze(0) for x in (q, k, v, g, beta)),
            cu_seqlens=packing.ends,
            chunk_indices=packing.chunks,
        )
        return output.squeeze(0)

    return run


# The kernels that the rule launches.
_KERNELS = (
    "chunk_local_cumsum_scalar_kernel",
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
    "recompute_w_u_fwd_kernel",
    "prepare_wy_repr_bwd_kernel",
    "fwd_kernel_h_blockdim64",
    "bwd_kernel_dhu_blockdim64",
    "chunk_fwd_kernel_o",
    "chunk_bwd_kernel_dv_local",
)


def _narrow(tuner: Any) -> None:
    """Keep one number of warps and stages of a kernel's candidates: trying all sixty takes over a minute.

    Two warps where four were seen to be compiled wrongly in a sister kernel on Hopper.
    """
    warps = 2 if tuner.kernel_name.startswith("prepare_wy_repr") else 4
    nearest = min((abs(c.num_warps - warps), abs(c.num_stages - 3)) for c in tuner.configs)
    tuner.configs = [c for c in tuner.configs if (abs(c.num_warps - warps), abs(c.num_stages - 3)) == nearest]


class _Gradients:
    """Gradients of q, k, w and the cumulative decays, given those of outputs and states, chunk by chunk."""

    def __init__(self) -> None:
        self._compute = torch.compile(_gradients, dynamic=False)

    def __call__(self, **given: Any) -> tuple[torch.Tensor, ...]:
        names = ("q", "k", "v", "do", "h", "dh", "g", "dv")
        return self._compute(*[given[name] for name in (*names, "scale")])


def _gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, h: torch.Tensor, dh: torch.Tensor,
    g: torch.Tensor, dv: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """q, k `[1, T, Hk, D]`; v, do, dv `[1, T, Hv, D]`; states h, dh `[1, N, Hv, D, D]`; g `[1, T, Hv]`,
    cumulative in each chunk, base 2.

    Returns dq, dk `[1, T, Hk, D]`, dw `[1, T, Hv, D]`, dg `[1, T, Hv]` float32.
    """
    tokens, heads, width = v.shape[1:]
    group = heads // q.shape[2]

    def chunks(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, CHUNK, x.shape[2], width).transpose(1, 2)

    def back(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).reshape(1, tokens, heads, width)

    q, k = (chunks(x).repeat_interleave(group, dim=1) for x in (q, k))
    v, do, dv = (chunks(x) for x in (v, do, dv))
    h, dh = (x[0].to(v.dtype) for x in (h, dh))
    total = g.reshape(-1, CHUNK, heads).transpose(1, 2)
    last = total[..., -1:]
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    decay = torch.exp2((total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, float("-inf"))) * scale
    scores = ((do @ v.mT) * decay).to(v.dtype)
    dw = -(dv @ h.mT)
    dq = (do @ h.mT) * (torch.exp2(total) * scale).unsqueeze(-1) + (scores @ k).float()
    carried = (v @ dh.mT).float() * torch.exp2(last - total).unsqueeze(-1)
    dk = carried + (scores.mT @ q).float()
    dg = (dq * q).sum(-1) - (dk * k).sum(-1)
    end = torch.exp2(last[..., 0]) * (h.float() * dh.float()).sum((-1, -2)) + (carried * k).sum((-1, -2))
    dg = torch.cat([dg[..., :-1], dg[..., -1:] + end.unsqueeze(-1)], dim=-1)
    dq, dk = (back(x).reshape(1, tokens, -1, group, width).sum(3).to(v.dtype) for x in (dq, dk))
    return dq, dk, back(dw), dg.transpose(1, 2).reshape(1, tokens, heads)
