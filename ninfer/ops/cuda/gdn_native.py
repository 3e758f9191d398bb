"""Launches of `csrc/gdn_step.cuh`: the recurrence on devices whose blocks form clusters (sm_90 and up).

Whether a mixer runs there depends on its geometry and the device alone, so that columns which were
recorded here are folded here.

Measured at 27B on an H200, 2026-11-30 (python -m bench.ops.gdn step), us a layer: mixer in place 6.8
(one request, one column), 9.3 (4 columns), 24.7 (8 requests, half of a copy's rate); fold of all layers 1.8,
14.4 for 8 requests (85 %).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache

import torch

from ninfer.ops.cuda.compile import Module
from ninfer.ops.delta import DeltaRecords
from ninfer.ops.fused import GdnMixer

_ROWS = 16
"""Rows of a state that a block holds."""
_STRIPS = 8
"""The most blocks of a cluster that every device has room for."""
_LANES, _RESIDENT = 16, 3
"""Threads that share a row, blocks that a multiprocessor has registers for."""

_LAYERS = 48
"""The most layers of one fold."""

_POINTERS = (
    "qkv", "k", "v", "z", "h", "a", "b", "weight", "norm", "conv_states", "out", "conv_records", "k_records",
    "v_records", "a_log", "dt_bias", "g", "beta", "states", "g_records", "beta_records", "order", "sources",
    "targets", "counts",
)  # fmt: skip
_NUMBERS = (
    "q_stride", "k_stride", "v_stride", "z_stride", "h_stride", "columns", "first", "record_rows",
    "key_heads", "slots",
)  # fmt: skip


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
def _module(
    width: int, group: int, width_v: int, taps: int, hidden: int, lanes: int, resident: int
) -> Module:
    names = ("DK", "GROUP", "STRIPS", "TAPS", "HIDDEN", "LANES", "RESIDENT", "LAYERS")
    values = (width, group, width_v // _ROWS, taps, hidden, lanes, resident, _LAYERS)
    return Module("gdn_step.cuh", dict(zip(names, values, strict=True)))


def programs() -> Iterator[Module]:
    """Of 27B, for those who compile without a GPU."""
    yield _module(128, 3, 128, 4, 5120, _LANES, _RESIDENT)


def _launch(
    kernel: str,
    tensors: dict[str, torch.Tensor | None],
    numbers: dict[str, int],
    eps: float,
    shape: tuple[int, int, int, int, int],
) -> None:
    states, requests = tensors["states"], tensors["sources"]
    assert states is not None
    assert requests is not None
    params = _Params(
        **{name: x.data_ptr() for name, x in tensors.items() if x is not None}, **numbers,
        slots=states.shape[0], eps=eps,
    )  # fmt: skip
    strips = shape[2] // _ROWS
    grid = (strips * numbers["key_heads"], requests.numel())
    function = _module(*shape, _LANES, _RESIDENT).function(kernel, states.device)
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
    q, k, v = None if q is None else _even(q), _even(k), _even(v)
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


class _FoldedLayer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p) for name in ("k", "v", "conv_records", "g", "beta", "states", "conv_states")
    ]


class _FoldParams(ctypes.Structure):
    """`FoldParams` of the source."""

    _fields_ = [
        ("layers", _FoldedLayer * _LAYERS),
        *((name, ctypes.c_void_p) for name in ("sources", "targets", "counts")),
        *((name, ctypes.c_int32) for name in ("columns", "key_heads", "slots")),
    ]


def fold(
    conv_records: Sequence[torch.Tensor],
    records: Sequence[DeltaRecords],
    counts: torch.Tensor,
    conv_states: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    """`fold_gdn` of layers of one geometry, with 2 to 4 taps."""
    first, requests = records[0], source_slots.numel()
    (key_heads, width), (heads, width_v) = first.k.shape[1:], first.v.shape[1:]
    strips = width_v // _ROWS
    shape = width, heads // key_heads, width_v, conv_states[0].shape[1] + 1, 4
    function = _module(*shape, _LANES, _RESIDENT).function("gdn_fold", counts.device)
    layers = list(zip(conv_records, records, conv_states, states, strict=True))
    for begin in range(0, len(layers), _LAYERS):
        part = layers[begin : begin + _LAYERS]
        params = _FoldParams(
            sources=source_slots.data_ptr(), targets=target_slots.data_ptr(), counts=counts.data_ptr(),
            columns=first.g.shape[0] // requests, key_heads=key_heads, slots=states[0].shape[0],
        )  # fmt: skip
        for place, (raw, record, history, state) in zip(params.layers, part, strict=False):
            place.k, place.v = record.k.data_ptr(), record.v.data_ptr()
            place.g, place.beta = record.g.data_ptr(), record.beta.data_ptr()
            place.conv_records, place.conv_states = raw.data_ptr(), history.data_ptr()
            place.states = state.data_ptr()
        function.launch((strips * key_heads, requests, len(part)), (_ROWS * _LANES,), (params,), pdl=True)


def _recorded(records: DeltaRecords | None) -> dict[str, torch.Tensor]:
    if records is None:
        return {}
    return {
        "k_records": records.k, "v_records": records.v, "g_records": records.g, "beta_records": records.beta
    }  # fmt: skip


def _even(x: torch.Tensor) -> torch.Tensor:
    """Rows that can be read four numbers at a time."""
    return x if x.stride(0) % 4 == 0 and x.data_ptr() % 8 == 0 and x.stride(-1) == 1 else x.contiguous()
