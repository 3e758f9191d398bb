"""Attention of few columns on CUDA, every format of pages, against float64."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

from ninfer.errors import OptionError
from ninfer.formats import KvFormat
from ninfer.ops import Rope
from ninfer.ops.cuda import attend_few
from ninfer.ops.cuda.attend import attention_bytes, gated_attention, paged_attention, sigmoid_mul
from ninfer.ops.cuda.attend_few import paged_attention_few
from ninfer.ops.cuda.compile import SOURCES, CompileError, compile_source
from ninfer.ops.cuda.prepare import qk_prepare
from tests.ops.criteria import ELEMENTWISE
from tests.ops.cuda.attention import CRITERIA, paged, positions_of, reference

every = pytest.mark.parametrize("format", KvFormat)
GEOMETRIES = [(256, 24, 4), (256, 16, 2), (128, 16, 4), (128, 8, 2), (256, 2, 1), (64, 9, 3), (256, 12, 2),
              (256, 6, 1)]  # fmt: skip
"""(width, query heads, key heads)"""


@pytest.mark.parametrize(
    ("arch", "format", "width", "tiles"),
    [
        ("sm_80", "int8", 256, 3),
        ("sm_80", "k8v4", 128, 6),
        ("sm_90a", "bf16", 64, 1),
        ("sm_90a", "k8v4", 256, 3),
    ],
)
def test_compiles(arch, format, width, tiles, tmp_path, monkeypatch) -> None:
    """Without a GPU, by NVRTC or by nvcc, whichever is here; the layouts of shared memory agree."""
    module, _ = attend_few._kernels(KvFormat(format), width, 4, 6, 33, tiles, None)
    monkeypatch.setenv("NINFER_CACHE", str(tmp_path))
    try:
        assert compile_source(module.source, module.defines, arch)
    except CompileError as error:
        if "does not compile" in str(error):
            raise
        if not shutil.which("nvcc"):
            pytest.skip("neither NVRTC nor nvcc is here")
        command = ["nvcc", "-std=c++17", f"-arch={arch}", "-cubin", "-x", "cu", str(SOURCES / module.source)]
        command += [f"-D{name}={value}" for name, value in module.defines.items()]
        subprocess.run([*command, "-o", str(tmp_path / "out.cubin")], check=True, capture_output=True)


@pytest.mark.gpu
@every
def test_portable(format, device) -> None:
    """Triton's kernels on the GPU."""
    cache = paged(format, 2, 20, 4, 256, device)
    positions = positions_of([1200, 65], 4, device)
    q = torch.randn(8, 24, 256, device=device).bfloat16()
    out = attend_few.attend(
        q, cache.pages, cache.table, positions, 0.0625, None, None, target=7, portable=True
    )
    CRITERIA[format].check(out, reference(q, cache, positions, 0.0625))


@every
@pytest.mark.parametrize(
    ("width", "q_heads", "k_heads", "ends", "columns"),
    [(64, 3, 1, [1, 130], 1), (256, 2, 1, [66], 3), (32, 2, 1, [17, 130], 16)],
)
def test_small(format, width, q_heads, k_heads, ends, columns, device) -> None:
    cache = paged(format, len(ends), 8, k_heads, width, device)
    positions = positions_of(ends, columns, device)
    q = torch.randn(len(ends) * columns, q_heads, width, device=device).bfloat16()
    out = paged_attention_few(q, cache.pages, cache.table, positions, width**-0.5)
    CRITERIA[format].check(out, reference(q, cache, positions, width**-0.5))


@every
def test_masked_columns_and_stale_rows(format, device) -> None:
    """Zero where masked; tables of masked requests and rows beyond the last position are not looked at."""
    cache = paged(format, 3, 3, 2, 64, device)
    positions = positions_of([73, 73, 73], 3, device)
    positions[3:6] = -1
    positions[8:] = -1
    q = torch.randn(9, 4, 64, device=device).bfloat16()
    expected = reference(q, cache, positions, 0.125)
    cache.table[1] = -(2**30)
    for plane in cache.planes():
        plane[cache.table[0, 1], 73 - 64 :] = 0xFF
        plane[cache.table[0, 2]] = 0xFF
        plane[cache.table[2, 1], 72 - 64 :] = 0xFF
        plane[cache.table[2, 2]] = 0xFF
    out = paged_attention_few(q, cache.pages, cache.table, positions, 0.125)
    assert not out[positions < 0].any()
    CRITERIA[format].check(out, expected)


@pytest.mark.gpu
@every
def test_a_column_depends_on_its_own_keys_only(format, device) -> None:
    """Not on other columns and requests, where pages are, how long the table is; also where the length of a
    split changes between columns."""
    ends = [attend_few.split_target(device, 2) * 64 + 2, 5, 300]
    count = -(-max(ends) // 64)
    cache = paged(format, 3, count, 2, 64, device)
    positions = positions_of(ends, 5, device)
    q = torch.randn(15, 4, 64, device=device).bfloat16()
    whole = paged_attention_few(q, cache.pages, cache.table, positions, 0.125)
    longer = torch.cat((cache.table, torch.zeros_like(cache.table)), 1)
    assert torch.equal(paged_attention_few(q, cache.pages, longer, positions, 0.125), whole)
    extent = max(ends)
    assert torch.equal(paged_attention_few(q, cache.pages, longer, positions, 0.125, extent=extent), whole)
    for t in range(15):
        table = cache.table[t // 5 : t // 5 + 1]
        alone = paged_attention_few(q[t : t + 1], cache.pages, table, positions[t : t + 1], 0.125)
        assert torch.equal(alone[0], whole[t])


def test_gate(device) -> None:
    cache = paged(KvFormat.INT8, 2, 2, 2, 64, device)
    positions = positions_of([70, 90], 2, device)
    q = torch.randn(4, 4, 64, device=device).bfloat16()
    gate = torch.randn(4, 512, device=device).bfloat16()[:, 256:]
    plain = paged_attention(q, cache.pages, cache.table, positions, 0.125)
    gated = gated_attention(q, gate, cache.pages, cache.table, positions, 0.125)
    expected = plain.double().view(4, 256) * torch.sigmoid(gate.double())
    ELEMENTWISE.check(gated, expected)
    separate = sigmoid_mul(plain.view(4, 256), gate)
    ELEMENTWISE.check(separate, expected)
    assert (gated.float() - separate.float()).abs().max() <= 2**-7
    assert attention_bytes(device, 4, 128, 4, 2, 64) >= plain.numel() * 2


def test_refused(device) -> None:
    cache = paged(KvFormat.INT8, 1, 1, 1, 64, device)
    q = torch.randn(1, 2, 64, device=device)
    with pytest.raises(OptionError):
        paged_attention_few(q, cache.pages, cache.table, positions_of([3], 1, device), 0.125)
    with pytest.raises(OptionError):
        sigmoid_mul(q, q)


@pytest.mark.gpu
@every
@pytest.mark.parametrize(("width", "q_heads", "k_heads"), GEOMETRIES)
def test_geometries(format, width, q_heads, k_heads, device) -> None:
    ends = [1, 63, 64, 65, 127, 1000, 8197, 4097]
    caches = paged(format, len(ends), 129, k_heads, width, device)
    for columns in (1, 2, 3, 4, 5, 8, 13, 16):
        at = [max(e, columns) for e in ends]
        positions = positions_of(at, columns, device)
        q = torch.randn(len(ends) * columns, q_heads, width, device=device).bfloat16()
        q[columns:] *= 3
        out = paged_attention_few(q, caches.pages, caches.table, positions, width**-0.5)
        CRITERIA[format].check(out, reference(q, caches, positions, width**-0.5))


@pytest.mark.gpu
@every
def test_long(format, device) -> None:
    cache = paged(format, 1, 1329, 4, 256, device)
    for columns in (1, 4):
        positions = positions_of([85_000], columns, device)
        q = 2 * torch.randn(columns, 24, 256, device=device).bfloat16()
        out = paged_attention_few(q, cache.pages, cache.table, positions, 256**-0.5)
        CRITERIA[format].check(out, reference(q, cache, positions, 256**-0.5))


@pytest.mark.gpu
@every
def test_recorded(format, device) -> None:
    """A graph's replay at other positions, tables and queries is what an eager call gives."""
    caches = paged(format, 2, 300, 4, 256, device)
    q = torch.randn(8, 24, 256, device=device).bfloat16()
    gate = torch.randn(8, 24 * 256, device=device).bfloat16()
    positions = positions_of([9, 4], 4, device)
    table = caches.table.clone()

    def work() -> torch.Tensor:
        return paged_attention_few(q, caches.pages, table, positions, 0.0625, gate)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    for ends in ([64, 65], [4000, 128], [19_000, 17_000], [4, 1000]):
        positions.copy_(positions_of(ends, 4, device))
        if ends[0] == 4000:
            positions[7] = -1
        q.normal_()
        table.copy_(caches.table.flatten()[torch.randperm(table.numel(), device=device)].view(table.shape))
        graph.replay()
        assert torch.equal(out, work())


@pytest.mark.gpu
@every
@pytest.mark.parametrize("columns", [1, 4])
def test_layers_in_a_graph(format, columns, device) -> None:
    """Kernels that start early, behind one that writes the newest keys: rounds of three layers in a graph are
    what the same operators give one at a time."""
    layers = [paged(format, 2, 40, 4, 256, device, seed=layer) for layer in range(3)]
    table, positions = layers[0].table, positions_of([129, 2100], columns, device)
    wide, norm = torch.randn(2 * columns, 80, 256, device=device).bfloat16(), torch.ones(256, device=device)
    rope = Rope(64, 1e7)

    def work(finish) -> torch.Tensor:
        x = wide
        for layer in layers:
            q, k, v = x[:, :24], x[:, 24:28], x[:, 28:32]
            q = qk_prepare(
                q, k, v, positions, rope, norm, norm, 1e-6, layer.pages, table, positions
            )  # fmt: skip
            finish()
            gate = x[:, 32:56].flatten(1)
            y = gated_attention(q, gate, layer.pages, table, positions, 0.0625)
            finish()
            x = torch.cat((y.view(-1, 24, 256), x[:, :56]), 1)
        return x

    work(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work(lambda: None)
    before = [[plane.clone() for plane in layer.planes()] for layer in layers]
    for _ in range(20):
        positions += columns
        wide.normal_()
        graph.replay()
        torch.cuda.synchronize()
        for layer, planes in zip(layers, before, strict=True):
            for plane, old in zip(layer.planes(), planes, strict=True):
                new = plane.clone()
                plane.copy_(old)
                old.copy_(new)
        assert torch.equal(work(torch.cuda.synchronize), out)
        for layer, planes in zip(layers, before, strict=True):
            for plane, new in zip(layer.planes(), planes, strict=True):
                assert torch.equal(plane, new)


@pytest.mark.gpu
@every
def test_huge_and_tiny_numbers(format, device) -> None:
    """Values of thousands and of thousandths, scores far apart."""
    for size in (3000.0, 1e-3):
        cache = paged(format, 1, 40, 2, 256, device)
        p = cache.pages
        if p.v_scales is None:
            p.v.mul_(size)
        elif p.v_scales.dtype == torch.float16:
            p.v_scales.mul_(size)
        else:
            continue
        positions = positions_of([2500], 4, device)
        q = 30 * torch.randn(4, 8, 256, device=device).bfloat16()
        out = paged_attention_few(q, cache.pages, cache.table, positions, 256**-0.5)
        expected = reference(q, cache, positions, 256**-0.5)
        CRITERIA[format].check(out.double() / size, expected / size)
