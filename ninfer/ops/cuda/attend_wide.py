"""Attention of many columns a request (prefill): flash attention over pages of 64 keys.

A program has some rows of one key head: neighbouring columns times the query heads of the key head, so that a
key is read once for all of them. Tiles of keys stand at multiples of 64, so a row's result depends on its own
keys only.

- Everywhere: a kernel in Triton. bf16 pages are read where they are, quantized ones decoded once a call in
  segments of `SEGMENT` keys, to bf16 scratch (a rotated vector is turned back), and the state of the softmax
  is carried from one segment to the next in float32.
- Hopper, heads of 256: the kernel of `csrc/attend_wide.cuh`, with pages of all formats decoded to scratch.
- Where programs are few, keys are split among more of them, and the states merged in ascending order.

Roofline: `4 D Hq` operations a visible key and column on the matrix units. A chunk of 4,096 columns at 85,000
keys (24 heads of 256) is 8.5 TFLOP.

Reached on an H200 (2026-11-30; a large bf16 product gave 796 TFLOP/s) by the kernel in Triton, 24/4 heads of
256, at 81,000 keys: 4,096 columns 15.4 ms, 543 TFLOP/s (int8 532, nvfp4 529); 1,024 columns 467; 256 columns
372; 17 columns 0.49 ms. Of the same call PyTorch's flash attention took 25.9 ms (323). The kernel of Hopper
agreed with this one within 1e-4, but has not been timed alone; `python -m bench.ops.prefill_attention` does.
"""

# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ninfer.errors import OptionError
from ninfer.formats import KvCode, KvFormat
from ninfer.formats.kv_codec import rotation_factor
from ninfer.ops.attention import PAGE, KvPages
from ninfer.ops.cuda.compile import Module
from ninfer.ops.cuda.kv_codes import CODES
from ninfer.ops.cuda.specimens import Specimen
from ninfer.ops.cuda.wide_kernels import decode_kernel, merge_kernel, wide_kernel

SEGMENT = 32768
"""Most keys that are decoded at a time."""
ENOUGH = 512
"""Programs that fill a device without splits."""
LEAST_SPLIT = 1024
HOPPER_KERNEL = False
"""Use `csrc/attend_wide.cuh`."""
IMAGES_PAY = 512
"""Columns from which bf16 pages are copied for the kernel of Hopper."""
HOPPER_SHARED = 64 * 1024 + 4 * 32 * 1024 + 64
_DECODED = 2048
"""Numbers that a program decodes."""


def wide_attention_bytes(columns: int, context: int, heads: int, kv_heads: int, width: int) -> int:
    """Most bytes of scratch that a call of one request with so many columns and visible keys allocates, its
    result apart: decoded keys and values, and states of the softmax where there are segments or splits."""
    bound = -(-context // PAGE) * PAGE
    decoded = 2 * 2 * min(bound, SEGMENT) * kv_heads * width
    states = int(bound > SEGMENT)
    for rows in (64, 128):  # of any device
        split = split_of(columns, heads // kv_heads, kv_heads, rows)
        if split and bound > split:
            states = max(states, -(-bound // split))
    return decoded + 4 * states * columns * heads * (width + 2) + 64


@dataclass(frozen=True)
class Tiling:
    """How a device cuts the work: rows of a program, its warps and stages, and whether tiles of keys come by
    the bulk copy engine."""

    rows: int
    warps: int
    stages: int
    bulk: bool
    hopper: bool = False
    """The kernel of `csrc/attend_wide.cuh`, which reads images of decoded pages."""


@functools.cache
def tiling(capability: tuple[int, int] | None, width: int, format: KvFormat, columns: int) -> Tiling:
    """The rule for all devices; None is the interpreter. `columns` are those of a request."""
    if capability is None:
        return Tiling(32, 4, 1, False)
    if capability[0] == 9:
        # Copying bf16 pages into images pays where there are many columns.
        hopper = HOPPER_KERNEL and width == 256 and (format is not KvFormat.BF16 or columns >= IMAGES_PAY)
        return Tiling(128, 8, 2, width & (width - 1) == 0 and width >= 64, hopper)
    if width <= 128:
        return Tiling(64, 4, 2, False)
    # Two stages of 256 need 104 KB of shared memory, which only the A100 has among GPUs of its kind.
    return Tiling(64, 8, 2 if capability == (8, 0) else 1, False)


@functools.cache
def split_of(columns: int, group: int, kv_heads: int, rows: int) -> int:
    """Keys of a program where there are few of them, 0 where one program takes all keys of its rows.

    A rule of the columns of a request only: the deeper the context, the more splits there are.
    """
    programs = -(-columns * group // rows) * kv_heads
    if programs >= ENOUGH:
        return 0
    return min(SEGMENT, max(LEAST_SPLIT, 1 << (256 * programs).bit_length() - 1))


def paged_attention_wide(
    q: torch.Tensor,
    pages: KvPages,
    page_table: torch.Tensor,
    cache_positions: torch.Tensor,
    scale: float,
    extent: int | None = None,
) -> torch.Tensor:
    """`ninfer.ops.paged_attention` for bf16 and any number of columns, made for more than 16 a request.

    Without `extent` launches are sized by the table; nothing is read back from the device.
    """
    columns, q_heads, width = q.shape
    requests = page_table.shape[0]
    if q.dtype != torch.bfloat16:
        raise OptionError(f"activations on a GPU are bf16, got {q.dtype}")
    pages.check(pages.heads, width, q.dtype)
    if columns % requests or q_heads % pages.heads or len(cache_positions) != columns:
        raise OptionError(
            f"queries {tuple(q.shape)} at {len(cache_positions)} positions of {requests} requests do not fit "
            f"pages of {pages.heads} heads"
        )
    q = q.contiguous()
    out = torch.empty_like(q)
    bound = page_table.shape[1] * PAGE
    if extent is not None:
        bound = min(bound, -(-extent // PAGE) * PAGE)
    each = columns // requests
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    cut = tiling(capability, width, pages.format, each)
    if pages.format is KvFormat.BF16 and not cut.hopper:
        call = _Call(q, page_table, cache_positions, out, scale, pages.heads, bound, True, cut)
        call.launch(pages.k, pages.v, 0, bound)
        call.merge()
        return out
    for request in range(requests):
        part = slice(request * each, (request + 1) * each)
        table, positions = page_table[request : request + 1], cache_positions[part]
        call = _Call(q[part], table, positions, out[part], scale, pages.heads, bound, False, cut)
        keys = min(bound, SEGMENT)
        k, v = (
            torch.empty((keys // PAGE, PAGE, pages.heads, width), dtype=q.dtype, device=q.device)
            for _ in range(2)
        )
        last = positions.amax(0, keepdim=True)
        for begin in range(0, bound, SEGMENT):
            end = min(begin + SEGMENT, bound)
            _decode(pages, table, last, begin, end, k, v, cut.hopper)
            call.launch(k, v, begin, end)
        call.merge()
    return out


@functools.cache
def _hopper() -> Module:
    return Module("attend_wide.cuh")


class _Call:
    """Attention of some requests to `bound` keys (a multiple of the page), segment after segment."""

    def __init__(
        self, q, table, positions, out, scale: float, heads: int, bound: int, paged: bool, cut: Tiling
    ) -> None:
        self.q, self.table, self.positions, self.out = q, table, positions, out
        self.scale, self.bound, self.paged = scale / math.log(2.0), bound, paged
        columns, q_heads, width = q.shape
        self.columns, self.group = columns // table.shape[0], q_heads // heads
        self.cut = cut
        self.split = split_of(self.columns, self.group, heads, self.cut.rows)
        if self.split >= bound:  # one split: its state is the result
            self.split = 0
        self.state = self.tops = self.masses = q
        if self.split or (bound > SEGMENT and not paged):
            parts = -(-bound // self.split) if self.split else 1
            self.state, self.tops, self.masses = (
                torch.empty((parts, columns, q_heads, n), dtype=torch.float32, device=q.device)
                for n in (width, 1, 1)
            )

    def launch(self, k: torch.Tensor, v: torch.Tensor, begin: int, end: int) -> None:
        """Keys `begin .. end`, which are all of k and v or, paged, where the table says."""
        width, heads, cut = self.q.shape[2], k.shape[2], self.cut
        tiles = triton.cdiv(self.columns * self.group, cut.rows)
        splits = triton.cdiv(end - begin, self.split) if self.split else 1
        first, last = begin == 0 or self.split > 0, end == self.bound and not self.split
        if cut.hopper:
            function = _hopper().function("attend_wide", self.q.device, HOPPER_SHARED)
            arguments = (
                self.q, k, v, self.positions, self.out, self.state, self.tops, self.masses, self.columns,
                self.group, heads, begin, end, self.split, first, last, self.scale,
            )  # fmt: skip
            function.launch((tiles, heads, splits), (384,), arguments)
            return
        k_bulk, v_bulk = k, v
        if cut.bulk:
            k_bulk, v_bulk = (
                TensorDescriptor(x, [x.shape[0] * PAGE, heads * width], [heads * width, 1], [PAGE, width])
                for x in (k, v)
            )
        wide_kernel[(tiles, heads * self.table.shape[0], splits)](
            self.q, k, v, k_bulk, v_bulk, self.table, self.positions, self.out, self.state, self.tops,
            self.masses, self.columns, self.table.stride(0), begin, end, self.scale,
            GROUP=self.group, HEADS=heads, WIDTH=width, BLOCK_D=max(16, triton.next_power_of_2(width)),
            BLOCK_M=cut.rows, PAGED=self.paged, BULK=cut.bulk, FIRST=first, LAST=last, SPLIT=self.split,
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip

    def merge(self) -> None:
        """Make the result of the splits."""
        if not self.split:
            return
        columns, q_heads, width = self.q.shape
        merge_kernel[(triton.cdiv(columns * q_heads, 8),)](
            self.state, self.tops, self.masses, self.positions, self.out, columns * q_heads,
            Q_HEADS=q_heads, WIDTH=width, BLOCK_D=max(16, triton.next_power_of_2(width)), ROWS=8,
            SPLIT=self.split, num_warps=4,
        )  # fmt: skip


def _decode(pages: KvPages, table, last, begin: int, end: int, k, v, images: bool) -> None:
    width = pages.width
    block = max(16, triton.next_power_of_2(width))
    rows = max(1, _DECODED // block)
    vectors = PAGE * pages.heads
    for side, codes, scales, out in (
        (pages.format.keys, pages.k, pages.k_scales, k),
        (pages.format.values, pages.v, pages.v_scales, v),
    ):
        decode_kernel[(triton.cdiv(vectors, rows), (end - begin) // PAGE)](
            codes, codes if scales is None else scales, out, table, last, begin // PAGE,
            PAGE_VECTORS=vectors, CODE=CODES[side.code],
            ROTATED=side.rotation(width), FACTOR=rotation_factor(width) if side.rotation(width) else 1.0,
            WIDTH=width, BLOCK=block, ROWS=rows, EACH=side.code.codes(width), SCALES=side.code.scales(width),
            IMAGES=images, num_warps=4,
        )  # fmt: skip


def programs() -> Iterator[Module]:
    yield _hopper()


def specimens() -> Iterator[Specimen]:
    planes = {
        KvCode.PLAIN: ("*bf16", "*bf16"),
        KvCode.INT8: ("*i8", "*fp16"),
        KvCode.FP8: ("*u8", "*fp16"),
        KvCode.NVFP4: ("*u8", "*u8"),
    }
    width, heads = 256, 4
    for code, (codes, scales) in planes.items():
        constants = {
            "PAGE_VECTORS": PAGE * heads, "CODE": CODES[code], "ROTATED": code is not KvCode.PLAIN,
            "FACTOR": rotation_factor(width), "WIDTH": width, "BLOCK": width, "ROWS": _DECODED // width,
            "EACH": code.codes(width), "SCALES": code.scales(width), "IMAGES": True,
        }  # fmt: skip
        signature = {"codes": codes, "scales": scales, "out": "*bf16", "table": "*i32", "last": "*i32"}
        yield Specimen(decode_kernel, {**signature, "first_page": "i32"}, constants, {"num_warps": 4})
    cut = tiling((8, 0), width, KvFormat.BF16, 4096)
    signature = {
        **dict.fromkeys(("q", "k", "v", "k_bulk", "v_bulk"), "*bf16"), "table": "*i32",
        "cache_positions": "*i32", "out": "*bf16", **dict.fromkeys(("state", "tops", "masses"), "*fp32"),
        **dict.fromkeys(("columns", "table_stride", "base", "end"), "i32"), "scale": "fp32",
    }  # fmt: skip
    for paged, first, last, split in (
        (True, True, True, 0), (False, True, False, 0), (False, False, True, 0), (False, True, False, 4096)
    ):  # fmt: skip
        constants = {
            "GROUP": 6, "HEADS": heads, "WIDTH": width, "BLOCK_D": width, "BLOCK_M": cut.rows, "PAGED": paged,
            "BULK": False, "FIRST": first, "LAST": last, "SPLIT": split,
        }  # fmt: skip
        yield Specimen(wide_kernel, signature, constants, {"num_warps": cut.warps, "num_stages": cut.stages})
    signature = {
        **dict.fromkeys(("state", "tops", "masses"), "*fp32"), "cache_positions": "*i32", "out": "*bf16",
        "rows": "i32",
    }  # fmt: skip
    constants = {"Q_HEADS": 24, "WIDTH": width, "BLOCK_D": width, "ROWS": 8, "SPLIT": 4096}
    yield Specimen(merge_kernel, signature, constants, {"num_warps": 4})
