"""Softmax attention over paged keys and values, and what happens to q, k and v before it.

A page holds 64 tokens of all heads (`KvPages`). Request `b` finds its position `p` in page
`page_table[b, p // 64]`, row `p % 64`. The T columns of a call are B requests of W = T / B columns each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ninfer.errors import OptionError
from ninfer.formats import KvCode, KvFormat
from ninfer.formats.kv_codec import plane_types
from ninfer.ops.dispatch import backend
from ninfer.ops.rope import Rope

PAGE = 64


@dataclass(frozen=True, eq=False)
class KvPages:
    """Keys and values of one layer, `[pages, 64, Hkv, X]` each.

    BF16: `k`, `v` hold the activation type, X = D, and there are no scales. Quantized: `k`, `v` hold the
    codes and `k_scales`, `v_scales` the scales of `KvCode`, encoded as `formats.kv_codec` says. Rows that no
    one wrote may hold anything.
    """

    format: KvFormat
    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.format.check(self.width)
        rows = (*self.k.shape[:1], PAGE, self.heads)
        for codes, scales, code in (
            (self.k, self.k_scales, self.format.keys.code),
            (self.v, self.v_scales, self.format.values.code),
        ):
            found = codes.dtype, None if scales is None else scales.dtype
            shapes = codes.shape, () if scales is None else scales.shape
            expected = (
                (*rows, code.codes(self.width)),
                () if scales is None else (*rows, code.scales(self.width)),
            )
            if found != plane_types(code, self.k.dtype) or shapes != expected:
                raise OptionError(
                    f"planes {[tuple(s) for s in shapes]} of {found} are no '{self.format}' pages of "
                    f"{self.heads} heads of {self.width}"
                )

    @property
    def heads(self) -> int:
        return self.k.shape[2]

    @property
    def width(self) -> int:
        """Dimensions of a key or value."""
        return self.k.shape[3] * (2 if self.format.keys.code is KvCode.NVFP4 else 1)

    def check(self, heads: int, width: int, activations: torch.dtype) -> None:
        """Raise `OptionError` unless the pages are for these heads."""
        if self.heads != heads or self.width != width:
            raise OptionError(f"pages of {self.heads} heads of {self.width} do not fit {heads} of {width}")
        if self.format is KvFormat.BF16 and self.k.dtype != activations:
            raise OptionError(
                f"activations and pages must have one type, got {activations} and {self.k.dtype}"
            )

    def copy(self, source: int, target: int) -> None:
        """Make a page like another."""
        for plane in (self.k, self.v, self.k_scales, self.v_scales):
            if plane is not None:
                plane[target].copy_(plane[source])


def qk_prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    rope: Rope,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    pages: KvPages,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
) -> torch.Tensor:
    """Normalize and rotate q and k, append k and v to the pages, return the prepared q.

    `q [T, Hq, D]`, `k`, `v` `[T, Hkv, D]` (bf16 or float32; rows may be slices of one wider tensor);
    `positions` int32 `[T]` or axis-major `[3, T]` turn the rotation, `cache_positions` int32 `[T]` choose the
    page rows, none where negative (a masked column appends nothing); `page_table` int32 `[B, P]`. With norms
    (`[D]`, applied as `1 + w`) the normalized value is rounded to the activation type before the rotation.
    What is appended is the prepared k, rounded to the activation type, and v as given, both as
    `formats.kv_codec.encode` codes them, bit by bit.
    """
    return backend(q.device.type).qk_prepare(
        q, k, v, positions, rope, q_norm, k_norm, eps, pages, page_table, cache_positions
    )


def paged_attention(
    q: torch.Tensor,
    pages: KvPages,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
    scale: float,
    extent: int | None = None,
) -> torch.Tensor:
    """`softmax(scale q.k_j) v_j` over the keys `j <= cache_positions[t]`: `[T, Hq, D]` -> `[T, Hq, D]`.

    Query head h reads key head `h // (Hq / Hkv)`; keys and values are the decoded ones of the pages, one
    rounding. Within a request the positions of a call ascend by one; a column at a negative position is
    masked: it reads nothing and its output is zero. How the keys are divided into partial sums depends on
    their own positions only, so a column's result depends on nothing but its own keys (with more than 16
    columns a request, where PyTorch has matrix tiles, also on how many they are).

    `extent` is a promise of the host that every position is below it. It sizes launches and scratch and never
    changes a result; None: nothing is known beyond the table's size.
    """
    return backend(q.device.type).paged_attention(q, pages, page_table, cache_positions, scale, extent)


def gated_attention(
    q: torch.Tensor,
    gate: torch.Tensor,
    pages: KvPages,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
    scale: float,
    extent: int | None = None,
) -> torch.Tensor:
    """`sigmoid_mul(paged_attention(...), gate)`, with its two roundings: `[T, Hq * D]`.

    `gate [T, Hq * D]`, rows may be strided.
    """
    module = backend(q.device.type)
    fused = getattr(module, "gated_attention", None)
    if fused is not None:
        return fused(q, gate, pages, page_table, cache_positions, scale, extent)
    a = module.paged_attention(q, pages, page_table, cache_positions, scale, extent)
    return module.sigmoid_mul(a.view(gate.shape), gate)
