"""Matrix products on the CPU: which route a call takes, and the calls themselves.

Few columns read the encoded weights in place (`small`). Many columns go through bf16 tiles where the
processor has them (`wide`), else through decoded float32 rows and PyTorch's matrix product, some rows at a
time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ninfer.errors import OptionError
from ninfer.ops.cpu import amx, small, wide
from ninfer.ops.cpu.access import BF16, FLOAT32, ROUNDED, kind_of, load_some, size_of, store_some
from ninfer.ops.cpu.block import argument, next_shared
from ninfer.ops.cpu.functions import silu
from ninfer.ops.cpu.kernel import Kernel, launch, threads
from ninfer.ops.cpu.plan import Plan, Segment, plan_of
from ninfer.ops.cpu.simd import mul, stack
from ninfer.ops.weights import Matrix

SMALL_COLUMNS = 16
"""Up to so many columns one route is taken, whose results for a column depend on nothing else in the call."""
_DECODED_ROWS = 2048
_PARALLEL = 1 << 13  # elements
_BLOCK = 1024


def swiglu_kernel(data):
    """`out = silu(gate) * up`. Arguments: 0 rows of gate, then up (float32), 1 out, 2 T, 3 width, 4 kind of
    out."""
    both, out, rows = argument(data, 0), argument(data, 1), argument(data, 2)
    width, kind = argument(data, 3), argument(data, 4)
    scratch = stack(64)
    blocks = (width + _BLOCK - 1) // _BLOCK
    while True:
        item = next_shared(data, 1)
        if item >= rows * blocks:
            break
        row, begin = item // blocks, item % blocks * _BLOCK
        for at in range(begin, min(width, begin + _BLOCK), 16):
            count = min(16, width - at)
            gate = both + 4 * (2 * width * row + at)
            value = silu(load_some(gate, FLOAT32, count, scratch))
            value = mul(value, load_some(gate + 4 * width, FLOAT32, count, scratch))
            store_some(out + size_of(kind) * (width * row + at), kind, value, count, scratch)


_swiglu = Kernel(swiglu_kernel)


def linear(x: torch.Tensor, w: Matrix, residual: torch.Tensor | None) -> torch.Tensor:
    plan = plan_of(w)
    out = torch.empty((x.shape[0], w.rows), dtype=x.dtype)
    if residual is not None and residual.shape != out.shape:
        raise OptionError(
            f"a residual of {tuple(residual.shape)} does not fit an output of {tuple(out.shape)}"
        )
    product(x, plan, out, kind_of(x), residual, w.rows)
    return out


def logits(x: torch.Tensor, head: Matrix, public_rows: int) -> torch.Tensor:
    out = torch.empty((x.shape[0], public_rows), dtype=torch.float32)
    kind = ROUNDED if kind_of(x) == BF16 else FLOAT32
    product(x, plan_of(head), out, kind, None, public_rows)
    return out


def linear_swiglu(x: torch.Tensor, gate_up: Matrix) -> torch.Tensor:
    plan = plan_of(gate_up)
    out = torch.empty((x.shape[0], gate_up.rows // 2), dtype=x.dtype)
    if not plan.halves:
        return _swiglu_of_different_formats(x, plan, gate_up, out)
    kind = kind_of(x)
    if x.shape[0] > SMALL_COLUMNS:
        if _has_tiles(kind):
            packed = _Packed(x, plan)
            for pair in plan.halves:
                packed.multiply(pair.left, pair.address, out, kind, None, pair.first, pair.rows, 1)
        else:
            _decoded_swiglu(x, plan, out)
        return out
    source = _Columns(x, kind, plan)
    for pair in plan.halves:
        codec = pair.left.planes.codec
        launch(
            small.linear_of(codec).address, threads(), pair.address, source.address(pair.left),
            out.data_ptr(), 0, x.shape[0], kind, kind, out.shape[1], pair.first, pair.rows, 1,
        )  # fmt: skip
    return out


def decode_rows(segment: Segment, begin: int, end: int, out: torch.Tensor) -> None:
    """Rows `[begin, end)` of a segment, decoded into `out [end - begin, K]` (bf16 or float32)."""
    launch(
        small.decode_of(segment.planes.codec).address, threads(), segment.address, 0, out.data_ptr(),
        end - begin, kind_of(out), out.shape[1], begin, segment.rows,
    )  # fmt: skip


def embedding(ids: torch.Tensor, table: Matrix, dtype: torch.dtype) -> torch.Tensor:
    plan = plan_of(table)
    if ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous():
        raise OptionError(f"token ids must be contiguous int32 or int64, got {ids.dtype}")
    out = torch.empty((ids.numel(), table.columns), dtype=dtype)
    for token in ids.tolist():
        if not 0 <= token < table.rows:
            raise OptionError(f"token id {token} is outside an embedding of {table.rows} rows")
    team = threads() if ids.numel() > 32 else 1
    for segment in plan.segments:
        launch(
            small.decode_of(segment.planes.codec).address, team, segment.address, ids.data_ptr(),
            out.data_ptr(), ids.numel(), kind_of(out), table.columns, segment.first, segment.rows,
            ids.element_size(),
        )  # fmt: skip
    return out


def _has_tiles(kind: int) -> bool:
    return kind == BF16 and amx.available()


def product(
    x: torch.Tensor,
    plan: Plan,
    out: torch.Tensor,
    out_kind: int,
    residual: torch.Tensor | None,
    rows: int,
    exact: bool = False,
) -> None:
    """The first `rows` rows of the matrix times the columns, into `out [T, rows]`.

    `exact` keeps weights in float32 on every route.
    """
    kind = kind_of(x)
    if x.shape[0] <= SMALL_COLUMNS:
        source = _Columns(x, kind, plan)
        add, add_kind = (0, 0) if residual is None else (residual.data_ptr(), kind_of(residual))
        for segment in plan.segments:
            count = min(segment.rows, rows - segment.first)
            if count <= 0:
                break
            launch(
                small.linear_of(segment.planes.codec).address, threads(), segment.address,
                source.address(segment), out.data_ptr(), add, x.shape[0], kind, out_kind, rows, segment.first,
                count, 0, add_kind,
            )  # fmt: skip
    elif _has_tiles(kind) and not exact:
        packed = _Packed(x, plan)
        for segment in plan.segments:
            count = min(segment.rows, rows - segment.first)
            if count > 0:
                packed.multiply(segment, segment.address, out, out_kind, residual, segment.first, count, 0)
    else:
        _decoded_product(x, plan, out, out_kind, residual, rows)


class _Columns:
    """The columns of a call as `small.linear_kernel` reads them: a single one in place, several as
    float32."""

    __slots__ = ("kind", "plan", "wide", "x")

    def __init__(self, x: torch.Tensor, kind: int, plan: Plan) -> None:
        self.x, self.kind, self.plan = x, kind, plan
        self.wide: dict[bool, torch.Tensor] = {}

    def address(self, segment: Segment) -> int:
        x, units = self.x, self.plan.units
        if x.shape[0] == 1:
            return x.data_ptr()
        wide = self.wide.get(segment.pairs)
        if wide is None:
            wide = self.wide[segment.pairs] = torch.empty((x.shape[0], 32 * units))
            launch(
                small.widen_of(segment.pairs).address, 1, 0, x.data_ptr(), wide.data_ptr(), x.shape[0],
                self.kind, x.shape[1], units,
            )  # fmt: skip
        return wide.data_ptr()


class _Packed:
    """The columns of a call as bf16 tiles, and the decoding buffers of the threads."""

    def __init__(self, x: torch.Tensor, plan: Plan) -> None:
        self.x, self.plan, self.team = x, plan, threads()
        self.memory = torch.empty(self.team * wide.scratch_bytes(x.shape[0]), dtype=torch.uint8)
        self.tiles: dict[bool, torch.Tensor] = {}

    def multiply(
        self,
        segment: Segment,
        constants: int,
        out: torch.Tensor,
        out_kind: int,
        residual: torch.Tensor | None,
        first: int,
        rows: int,
        gated: int,
    ) -> None:
        x, units = self.x, self.plan.units
        tiles = self.tiles.get(segment.pairs)
        if tiles is None:
            tiles = self.tiles[segment.pairs] = torch.empty(
                -(-x.shape[0] // 16) * 1024 * units, dtype=torch.uint8
            )
            launch(
                wide.pack_of(segment.pairs).address, self.team, 0, x.data_ptr(), tiles.data_ptr(), x.shape[0],
                x.shape[1], units,
            )  # fmt: skip
        add, add_kind = (0, 0) if residual is None else (residual.data_ptr(), kind_of(residual))
        launch(
            wide.tiles_of(segment.planes.codec).address, self.team, constants, tiles.data_ptr(),
            out.data_ptr(), add, x.shape[0], self.memory.data_ptr(), out_kind, out.shape[1], first, rows,
            gated, add_kind, amx.CONFIGURATION.ctypes.data,
        )  # fmt: skip


def _decoded(plan: Plan, begin: int, end: int, columns: int) -> torch.Tensor:
    """Matrix rows `[begin, end)` as float32."""
    out = torch.empty((end - begin, columns))
    for segment in plan.segments:
        low, high = max(begin, segment.first), min(end, segment.first + segment.rows)
        if low < high:
            decode_rows(segment, low - segment.first, high - segment.first, out[low - begin : high - begin])
    return out


def _decoded_product(
    x: torch.Tensor, plan: Plan, out: torch.Tensor, out_kind: int, residual: torch.Tensor | None, rows: int
) -> None:
    columns = x.float()
    for begin in range(0, rows, _DECODED_ROWS):
        end = min(rows, begin + _DECODED_ROWS)
        part = F.linear(columns, _decoded(plan, begin, end, x.shape[1]))
        if residual is not None:
            part += residual[:, begin:end]
        out[:, begin:end] = part.bfloat16() if out_kind == ROUNDED else part


def _decoded_swiglu(x: torch.Tensor, plan: Plan, out: torch.Tensor) -> None:
    columns, half = x.float(), out.shape[1]
    for begin in range(0, half, _DECODED_ROWS):
        end = min(half, begin + _DECODED_ROWS)
        gate = F.linear(columns, _decoded(plan, begin, end, x.shape[1]))
        up = F.linear(columns, _decoded(plan, half + begin, half + end, x.shape[1]))
        out[:, begin:end] = F.silu(gate).mul_(up)


def _swiglu_of_different_formats(
    x: torch.Tensor, plan: Plan, gate_up: Matrix, out: torch.Tensor
) -> torch.Tensor:
    both = torch.empty((x.shape[0], gate_up.rows), dtype=torch.float32)
    product(x, plan, both, FLOAT32, None, gate_up.rows)
    launch(
        _swiglu.address, threads() if out.numel() > _PARALLEL else 1, 0, both.data_ptr(), out.data_ptr(),
        x.shape[0], out.shape[1], kind_of(out),
    )  # fmt: skip
    return out
