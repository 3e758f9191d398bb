"""Kernels in CUDA C++ on a machine without a GPU: compiled by the host's C++ compiler, see `host.cpp`.

Slow, and no test of what goes wrong between threads that run at once; but every branch of the arithmetic is
that of the GPU.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

from ninfer.ops.cuda.compile import SOURCES

COMPILER = shutil.which("g++")


def build(source: str, launchers: str, folder: Path) -> ctypes.CDLL:
    """The library of a source of `csrc/` and of functions that launch its kernels."""
    assert COMPILER is not None
    text = (SOURCES / source).read_text()
    text = re.sub(r'#include ".*"|#pragma once', "", text)
    shared = r"\1* \2 = reinterpret_cast<\1*>(dynamic_shared);"
    text = re.sub(r"extern __shared__ (\w+) (\w+)\[\];", shared, text)
    (folder / "kernels.inc").write_text(text + launchers)
    library = folder / "kernels.so"
    subprocess.run(
        [
            COMPILER, "-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-w",
            f'-DKERNELS="{folder / "kernels.inc"}"', str(Path(__file__).with_name("host.cpp")),
            "-o", str(library),
        ],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))
