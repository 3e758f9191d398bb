"""Small products on the GPU against float64; their kernels compile everywhere."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

from ninfer.errors import OptionError
from ninfer.ops.cuda.compile import SOURCES, CompileError, compile_source
from ninfer.ops.cuda.pack import PACKINGS
from ninfer.ops.cuda.packed import Packed
from ninfer.ops.cuda.small import AMPERE, HOPPER, Mode, Norm, divide, module, plan, small_linear
from tests.ops.criteria import LINEAR
from tests.ops.cuda.fragments import BF16, FP8, MAKERS, NVFP4, Made

COLUMNS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64)
SHAPES = {
    "nvfp4": [(53, 75), (48, 64), (300, 640), (1000, 5120), (5120, 6144), (5120, 17408), (16384, 5120)],
    "fp8": [(53, 75), (300, 640), (5120, 17408)],
    "bf16": [(53, 75), (1000, 5120), (5120, 6144)],
}

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _x(tokens: int, columns: int, seed: int = 1) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn((tokens, columns), generator=g, device="cuda") * 2).clamp(-8, 8).bfloat16()


def _poison(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def _silu_product(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, 1)
    return gate * torch.sigmoid(gate) * up


def _made(format: str, rows: int, columns: int, interleaved: bool = False) -> Made:
    return MAKERS[format](rows, columns, torch.device("cuda"), rows + columns, interleaved)


@gpu
@needs_gpu
@pytest.mark.parametrize(("format", "shape"), [(f, shape) for f in MAKERS for shape in SHAPES[f]])
def test_plain(format, shape):
    made = _made(format, *shape)
    x = _x(64, shape[1])
    exact = x.double() @ made.values.T
    residual = _x(64, shape[0], 2)
    whole = small_linear(x, made.packed, _poison(64, shape[0]))
    for t in COLUMNS:
        out = small_linear(x[:t], made.packed, _poison(t, shape[0]))
        LINEAR.check(out, exact[:t])
        assert torch.equal(out, whole[:t]), f"a column depends on T = {t}"
        out = small_linear(x[:t], made.packed, _poison(t, shape[0]), residual=residual[:t])
        LINEAR.check(out, exact[:t] + residual[:t].double())
    raw = small_linear(x[:3], made.packed, _poison(3, shape[0], dtype=torch.float32), mode=Mode.RAW)
    assert float((raw.double() - exact[:3]).norm() / exact[:3].norm()) < 2e-6
    public = shape[0] - 19
    scores = small_linear(x[:3], made.packed, _poison(3, public, dtype=torch.float32), mode=Mode.LOGITS)
    assert torch.equal(scores, whole[:3, :public].float())


@gpu
@needs_gpu
@pytest.mark.parametrize(
    ("format", "shape"),
    [("nvfp4", (54, 75)), ("nvfp4", (34816, 5120)), ("fp8", (640, 640)), ("bf16", (54, 75))],
)
def test_swiglu(format, shape):
    made = _made(format, *shape, interleaved=True)
    x = _x(64, shape[1]) / 8
    exact = _silu_product(x.double() @ made.values.T)
    whole = small_linear(x, made.packed, _poison(64, shape[0] // 2), mode=Mode.SWIGLU)
    for t in COLUMNS:
        out = small_linear(x[:t], made.packed, _poison(t, shape[0] // 2), mode=Mode.SWIGLU)
        LINEAR.check(out, exact[:t])
        assert torch.equal(out, whole[:t])


@gpu
@needs_gpu
@pytest.mark.parametrize("shape", [(53, 72), (640, 5120), (1024, 17408)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm(shape, dtype):
    made = _made("fp8", *shape)
    x = _x(64, shape[1])
    gain = torch.randn(shape[1], device="cuda").to(dtype)
    wide = x.double()
    exact = wide / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt() * (1 + gain.double())
    whole = None
    for t in (64, *COLUMNS):
        h = _poison(t, shape[1])
        out = small_linear(x[:t], made.packed, _poison(t, shape[0]), norm=Norm(gain, 1e-6, True, h))
        assert float((h.double() - exact[:t]).abs().max() / exact[:t].abs().max()) < 2**-8
        LINEAR.check(out, exact[:t] @ made.values.T)
        whole = (out, h) if whole is None else whole
        assert torch.equal(out, whole[0][:t])
        assert torch.equal(h, whole[1][:t])


@gpu
@needs_gpu
def test_segments_and_maps():
    top, bottom = _made("nvfp4", 100, 192), _made("fp8", 60, 192)
    first, second = top.packed.segments[0], bottom.packed.segments[0]
    order = torch.randperm(160, device="cuda", dtype=torch.int32)
    kind = type(first)
    parts = [
        kind(s.packing, s.format, 0, s.rows, s.columns, s.data, s.row_scales, m)
        for s, m in ((first, order[:100]), (second, order[100:]))
    ]
    packed = Packed(160, 192, tuple(parts))
    x = _x(5, 192)
    values = torch.cat((top.values, bottom.values))
    exact = torch.empty(160, 192, dtype=torch.float64, device="cuda")
    exact[order.long()] = values
    LINEAR.check(small_linear(x, packed, _poison(5, 160)), x.double() @ exact.T)


@gpu
@needs_gpu
def test_capture():
    made = _made("nvfp4", 5120, 6144)
    x = _x(4, 6144)
    expected = small_linear(x, made.packed, _poison(4, 5120))
    graph = torch.cuda.CUDAGraph()
    outs = [_poison(4, 5120) for _ in range(3)]
    with torch.cuda.graph(graph):
        for out in outs:
            small_linear(x, made.packed, out)
    for _ in range(2):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for out in outs:
            assert torch.equal(out, expected)


@gpu
@needs_gpu
def test_refusals():
    made = _made("bf16", 32, 64)
    with pytest.raises(OptionError):
        small_linear(_x(65, 64), made.packed, _poison(65, 32))
    with pytest.raises(OptionError):
        small_linear(_x(1, 64).float(), made.packed, _poison(1, 32))
    with pytest.raises(OptionError):
        small_linear(_x(1, 64), made.packed, _poison(1, 16), mode=Mode.SWIGLU)


@pytest.mark.parametrize("device", [HOPPER, AMPERE])
def test_plans(device):
    shapes = ((1, 1), (4, 2), (64, 80), (320, 96), (320, 272), (1024, 80), (2176, 80), (15520, 80))
    kinds: tuple[set[int], set[int]] = (set(), set())
    for packing in (NVFP4, FP8, BF16, PACKINGS["Q4K"], PACKINGS["Q6K"], PACKINGS["Q8G32"]):
        for tiles, units in shapes:
            slices = divide(tiles, units, device)
            for tokens in (1, 2, 4, 8, 16):
                for norm in (0, 1, 2):
                    made = plan(packing, slices, units, tokens, norm, device)
                    if made is None:
                        assert tokens > 1, "one token always fits"
                        continue
                    assert made.warps * made.cluster == slices
                    assert made.turns == -(-units // slices)
                    assert made.shared_bytes <= device.shared_bytes
                    assert 2 <= made.pace <= made.copies
                    if made.blocks == 2:
                        kinds[norm > 0].add(made.shared_bytes + 1024)
                    assert made.copies * made.copy_turns * made.warps * packing.unit_bytes < made.shared_bytes
    if device is HOPPER:
        # One behind a norm and one that is not share a multiprocessor, two that are not behind a norm do not.
        memory = device.shared_bytes + 1024
        assert max(kinds[0]) + max(kinds[1]) <= memory < 2 * min(kinds[0])


@pytest.mark.parametrize("device", [HOPPER, AMPERE], ids=["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    ("packing", "tokens", "norm"),
    [
        (NVFP4, 1, 1),
        (NVFP4, 16, 0),
        (FP8, 8, 2),
        (BF16, 1, 0),
        (PACKINGS["Q4K"], 1, 1),
        (PACKINGS["Q6K"], 8, 0),
    ],
)
def test_compiles(device, packing, tokens, norm, tmp_path, monkeypatch):
    """Without a GPU, by NVRTC or by nvcc, whichever is here."""
    made = plan(packing, divide(320, 80, device), 80, tokens, norm, device)
    if made is None:
        pytest.skip("takes fewer tokens at a time")
    arch = "sm_90a" if device is HOPPER else "sm_80"
    defines = module(packing, made).defines
    monkeypatch.setenv("NINFER_CACHE", str(tmp_path))
    try:
        assert compile_source("small.cuh", defines, arch)
    except CompileError as error:
        if "does not compile" in str(error) or not shutil.which("nvcc"):
            if "does not compile" in str(error):
                raise
            pytest.skip("neither NVRTC nor nvcc is here")
        command = ["nvcc", "-std=c++17", f"-arch={arch}", "-cubin", "-x", "cu", str(SOURCES / "small.cuh")]
        command += [f"-D{name}={value}" for name, value in defines.items()]
        subprocess.run([*command, "-o", str(tmp_path / "out.cubin")], check=True, capture_output=True)
