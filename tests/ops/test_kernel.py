"""Compiling, caching and starting kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ninfer.errors import OptionError
from ninfer.ops import linear
from ninfer.ops.cpu import kernel
from ninfer.ops.cpu.block import argument, arrive, next_shared, team_size
from ninfer.ops.cpu.kernel import Kernel, bits, launch, machine_threads
from ninfer.ops.cpu.simd import fetch_add, fma, get_f64, get_i64, load_f32, put_i64, splat, store_f32
from ninfer.ops.dispatch import backend
from tests.ops.weights import random_matrix

TIMES = 3


def count_kernel(data):
    """Add to argument 0 what items were claimed; report team size and members."""
    arrive(data)
    put_i64(argument(data, 2), team_size(data))
    while True:
        item = next_shared(data, 1)
        if item >= argument(data, 1):
            break
        fetch_add(argument(data, 0), item * TIMES)


def constants_kernel(data):
    for i in range(32):
        put_i64(argument(data, 0) + 8 * i, argument(data, i))


def double_kernel(data):
    x = load_f32(argument(data, 0))
    store_f32(argument(data, 0), fma(x, splat(get_f64(data + 8)), x))


def raising_kernel(data):
    for _ in range(0, 10, argument(data, 0)):  # a step of zero raises
        put_i64(data, get_i64(data))


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_every_item_is_done_once(threads: int) -> None:
    total, team = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    launch(Kernel(count_kernel).address, threads, 0, total.data_ptr(), 100, team.data_ptr())
    assert total.item() == 3 * sum(range(100))
    assert team.item() == threads


def test_bindings_replace_names() -> None:
    total, team = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    bound = Kernel(count_kernel, "count_five", TIMES=5)
    launch(bound.address, 2, 0, total.data_ptr(), 100, team.data_ptr())
    assert total.item() == 5 * sum(range(100))


def test_arguments_constants_and_zeros() -> None:
    out = torch.zeros(32, dtype=torch.int64)
    constants = torch.arange(100, 120)
    launch(Kernel(constants_kernel).address, 1, constants.data_ptr(), out.data_ptr(), -5, 6)
    assert out.tolist() == [out.data_ptr(), -5, 6, *[0] * 9, *range(100, 120)]
    launch(Kernel(constants_kernel).address, 1, 0, out.data_ptr())
    assert out.tolist() == [out.data_ptr(), *[0] * 31]


def test_floats_travel_as_bits() -> None:
    x = torch.arange(16.0)
    launch(Kernel(double_kernel).address, 1, 0, x.data_ptr(), bits(1.0))
    assert torch.equal(x, 2 * torch.arange(16.0))


def test_wrong_arguments_raise() -> None:
    with pytest.raises(TypeError):
        launch("no address", 1, 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OverflowError):
        launch(Kernel(constants_kernel).address, 1, 0, 1 << 80)


def test_operations_belong_to_kernels() -> None:
    with pytest.raises(TypeError, match="instruction of compiled kernels"):
        splat(1.0)


def test_a_kernel_that_could_raise_is_refused() -> None:
    with pytest.raises(RuntimeError, match="can raise an exception"):
        _ = Kernel(raising_kernel).address


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(OptionError, match="no operators for device 'abacus'; available: cpu"):
        backend("abacus")


def test_threads_of_the_machine() -> None:
    assert 1 <= machine_threads() <= (os.cpu_count() or 1)


def test_python_threads_may_call_at_the_same_time() -> None:
    w, _ = random_matrix("ggml_q4_1", 200, 224)
    x = torch.randn(1, 224).bfloat16()
    expected = linear(x, w)
    wrong = []

    def work() -> None:
        wrong.extend(1 for _ in range(200) if not torch.equal(linear(x, w), expected))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


SCRIPT = """
import sys, torch
from ninfer.ops import SamplingParams, Purpose, sample
assert sample(torch.tensor([[1.0, 3.0, 2.0]]), [SamplingParams(temperature=0.0)], [0], Purpose.DECODE) == [1]
print("numba" in sys.modules)
"""


WITHOUT_OPENMP = "import ninfer.ops.cpu.kernel as kernel; kernel.openmp = dict; assert kernel.threads() == 1"


def start(cache: Path | str, script: str = SCRIPT) -> bool:
    """Run a kernel in a fresh process; did it need the compiler?"""
    environment = {**os.environ, "NINFER_CACHE": str(cache)}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip() == "True"


def test_a_second_start_needs_no_compiler_and_damage_is_repaired(tmp_path: Path) -> None:
    assert start(tmp_path)
    files = sorted((tmp_path / "kernels").glob("*.o"))
    assert len(files) == 2
    assert not start(tmp_path, WITHOUT_OPENMP + SCRIPT)
    damaged = next(f for f in files if f.name.startswith("choose"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    assert start(tmp_path)
    assert not start(tmp_path)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert start(blocked)


def test_a_full_disk_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kernel, "_folder", lambda: tmp_path)
    monkeypatch.setattr(kernel.tempfile, "NamedTemporaryFile", refuse)
    assert kernel._cached("nothing", lambda name: name.encode()) == b"nothing"
    assert not list(tmp_path.iterdir())
