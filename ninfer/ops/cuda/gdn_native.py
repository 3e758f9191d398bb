"""Launches of `csrc/gdn_step.cuh`: the recurrence on devices whose blocks form clusters (sm_90 and up).

Whether a mixer runs there depends on its geometry and the device alone, so that columns which were recorded here
are folded here.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from ninfer.ops.cuda.compile import Module
from ninfer.ops.delta import DeltaRecords
from ninfer.ops.fused import GdnMixer

_ROWS = 16
"""Rows of a state that a block holds."""
_STRIPS = 8
"""The most blocks of a cluster that every device has room for."""
_LANES = 16
"""Threads that share a row."""

_POINTERS = (
    "qkv k v z h a b weight norm conv_states out conv_records k_records v_records a_log dt_bias g beta states "
    "g_records beta_records order sources targets counts"
).split()
_NUMBERS = "q_stride k_stride v_stride z_stride h_stride columns first record_rows key_heads".split()


class _Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int32) for name in _NUMBERS),
        ("eps", ctypes.c_float),
    ]


def runs(device: torch.device, value_heads: int, key_heads: int, width: int, width_v: int) -> bool:
    """Is there a kernel for this geometry on this device?"""
    return (
        device.type == "cuda"
        and _has_clusters(device.index if device.index is not None else torch.cuda.current_device())
        and width in (64, 128)
        and width_v % _ROWS == 0
        and width_v // _ROWS <= _STRIPS
        and value_heads // key_heads <= 4
    )


@cache
def _has_clusters(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


@cache
def _module(width: int, group: int, width_v: int, taps: int, hidden: int, lanes: int) -> Module:
    names = ("DK", "GROUP", "STRIPS", "TAPS", "HIDDEN", "LANES")
    values = (width, group, width_v // _ROWS, taps, hidden, lanes)
    return Module("gdn_step.cuh", dict(zip(names, values, strict=True)))


def _launch(
    kernel: str,
    tensors: dict[str, torch.Tensor | None],
    numbers: dict[str, int],
    eps: float,
    shape: tuple[int, int, int, int, int],
) -> None:
    states, requests = tensors["states"], tensors["sources"]
    assert states is not None and requests is not None
    width, group, width_v = shape[:3]
    params = _Params(
        **{name: x.data_ptr() for name, x in tensors.items() if x is not None}, **numbers, eps=eps
    )
    strips = width_v // _ROWS
    grid = (strips * numbers["key_heads"], requests.numel())
    function = _module(*shape, _LANES).function(kernel, states.device)
    function.launch(
        grid, (_ROWS * _LANES,), (params,), pdl=True, cluster=strips if kernel == "gdn_mix" else 1
    )


def run_columns(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    out: torch.Tensor | None,
    first: int,
    records: DeltaRecords | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """`run_columns` of `gdn_step`; heads of a row stand side by side, rows and widths are even."""
    key_heads, width = k.shape[1:]
    heads, width_v = v.shape[1:]
    q, k, v = (None if x is None else _even(x) for x in (q, k, v))
    assert k is not None and v is not None
    tensors = {
        "qkv": q, "k": k, "v": v, "g": g, "beta": beta, "states": states, "sources": source_slots,
        "targets": target_slots, "counts": counts, "out": out, **_recorded(records),
    }  # fmt: skip
    numbers = {
        "q_stride": 0 if q is None else q.stride(0), "k_stride": k.stride(0), "v_stride": v.stride(0),
        "columns": v.shape[0] // source_slots.numel(), "first": first, "key_heads": key_heads,
        "record_rows": 0 if records is None else records.g.shape[0] // source_slots.numel(),
    }  # fmt: skip
    _launch("gdn_columns", tensors, numbers, 0.0, (width, heads // key_heads, width_v, 4, 4))


def mix(
    m: GdnMixer,
    a: torch.Tensor,
    b: torch.Tensor,
    qkv: torch.Tensor,
    z: torch.Tensor,
    h: torch.Tensor,
    conv_states: torch.Tensor,
    states: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    conv_records: torch.Tensor | None,
    records: DeltaRecords | None,
) -> torch.Tensor:
    """`gdn_mix` of up to 16 columns a request, with up to 4 taps."""
    requests, count = source_slots.numel(), h.shape[0]
    out = torch.empty((count, m.value_heads * m.value_dim), dtype=h.dtype, device=h.device)
    qkv, z, h = _even(qkv), _even(z), _even(h)
    tensors = {
        "qkv": qkv, "z": z, "h": h, "a": a, "b": b, "weight": m.convolution, "norm": m.norm,
        "conv_states": conv_states, "out": out, "conv_records": conv_records, "a_log": m.a_log,
        "dt_bias": m.dt_bias, "states": states, "order": m.head_order, "sources": source_slots,
        "targets": target_slots, **_recorded(records),
    }  # fmt: skip
    numbers = {
        "q_stride": qkv.stride(0), "z_stride": z.stride(0), "h_stride": h.stride(0),
        "columns": count // requests, "key_heads": m.key_heads,
        "record_rows": 0 if records is None else records.g.shape[0] // requests,
    }  # fmt: skip
    group, taps = m.value_heads // m.key_heads, m.convolution.shape[0]
    _launch("gdn_mix", tensors, numbers, m.eps, (m.key_dim, group, m.value_dim, taps, h.shape[1]))
    return out


def _recorded(records: DeltaRecords | None) -> dict[str, torch.Tensor]:
    if records is None:
        return {}
    return {
        "k_records": records.k, "v_records": records.v, "g_records": records.g, "beta_records": records.beta
    }  # fmt: skip


def _even(x: torch.Tensor) -> torch.Tensor:
    """Rows that can be read four numbers at a time."""
    return x if x.stride(0) % 4 == 0 and x.data_ptr() % 8 == 0 and x.stride(-1) == 1 else x.contiguous()
