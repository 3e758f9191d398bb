"""Decoded keys and values of one request, head by head, for attention of many columns.

Rotated ones are turned back, so that the caller works with the model's own queries and outputs. Roofline: the
bytes read and written.
"""

from __future__ import annotations

import functools

import torch

from ninfer.formats import KvFormat
from ninfer.ops.attention import KvPages
from ninfer.ops.cpu.access import kind_of, size_of, write_row
from ninfer.ops.cpu.block import argument, next_shared
from ninfer.ops.cpu.instructions import device
from ninfer.ops.cpu.kernel import Kernel, bits, launch, threads
from ninfer.ops.cpu.kv import PLAIN, bindings, code_bytes, hadamard, rotation, scale_addresses, scale_bytes
from ninfer.ops.cpu.simd import copy_bytes, get_f64, get_i32, stack

# What the kernel is specialized for: the format of the pages; see `kv.Side`.
decode_key = decode_value = PLAIN.decode
K_BITS = V_BITS = K_SCALE = V_SCALE = 0
K_GROUP = V_GROUP = 1
K_ROTATED = V_ROTATED = QUANTIZED = False


@device
def _finish(row, width, rotated, factor, target, kind):
    if rotated and factor:
        hadamard(row, width, factor)
    write_row(row, target, kind, width)


def gather_kernel(data):
    """An item is a page.

    Arguments: 0 k pages, 1 v pages, 2 key scales, 3 value scales, 4 page table, 5 how many keys, 6 key heads,
    7 width, 8 kind, 9 factor of the rotation, 0 without one, 10 keys out, 11 values out `[heads, keys,
    width]`.
    """
    k_pages, v_pages, k_scales, v_scales = (
        argument(data, 0),
        argument(data, 1),
        argument(data, 2),
        argument(data, 3),
    )
    table, count, heads, width = argument(data, 4), argument(data, 5), argument(data, 6), argument(data, 7)
    kind, factor, keys, values = argument(data, 8), get_f64(data + 72), argument(data, 10), argument(data, 11)
    size = size_of(kind)
    k_bytes, v_bytes = code_bytes(K_BITS, width, size), code_bytes(V_BITS, width, size)
    k_scale_bytes, v_scale_bytes = scale_bytes(K_GROUP, K_SCALE, width), scale_bytes(V_GROUP, V_SCALE, width)
    row = stack(4 * width + 64)
    while True:
        begin = 64 * next_shared(data, 1)
        if begin >= count:
            break
        page = get_i32(table + (begin >> 4))
        for head in range(heads):
            for key in range(min(64, count - begin)):
                vector = (64 * page + key) * heads + head
                at = size * width * (head * count + begin + key)
                if QUANTIZED:
                    decode_key(
                        k_pages + k_bytes * vector, k_scales + k_scale_bytes * vector, kind, width, row
                    )
                    _finish(row, width, K_ROTATED, factor, keys + at, kind)
                    decode_value(
                        v_pages + v_bytes * vector, v_scales + v_scale_bytes * vector, kind, width, row
                    )
                    _finish(row, width, V_ROTATED, factor, values + at, kind)
                else:
                    copy_bytes(keys + at, k_pages + k_bytes * vector, k_bytes)
                    copy_bytes(values + at, v_pages + v_bytes * vector, v_bytes)


@functools.cache
def _gather(format: KvFormat) -> Kernel:
    return Kernel(gather_kernel, f"gather_{format}", **bindings(format))


def gather(
    pages: KvPages, table: torch.Tensor, count: int, activations: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` keys and values `[Hkv, count, D]` of the request with this row of the page table."""
    keys = torch.empty((pages.heads, count, pages.width), dtype=activations)
    values = torch.empty_like(keys)
    launch(
        _gather(pages.format).address, threads() if count > 64 else 1, 0, pages.k.data_ptr(),
        pages.v.data_ptr(), *scale_addresses(pages), table.data_ptr(), count, pages.heads, pages.width,
        kind_of(keys), bits(rotation(pages.width)), keys.data_ptr(), values.data_ptr(),
    )  # fmt: skip
    return keys, values
