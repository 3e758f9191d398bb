"""Compile every kernel of `ninfer/ops/cuda` for sm_80 and sm_90, without a GPU.

    python -m tools.compile_kernels [--targets 80,90] [--processes 2] [--json FILE] [NAME ...]

Triton kernels are those of each module's `specimens()`, CUDA C++ is that of each module's `programs()` (an
iterable of `compile.Module`), compiled by NVRTC, or by nvcc where that is not installed. NAME: only modules
whose name contains one. Prints registers, spills and shared memory of each; exits with 1 if one does not
compile.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

os.environ.pop("TRITON_INTERPRET", None)  # read when a module with kernels is imported

PACKAGE = "ninfer.ops.cuda"
SKIPPED = "no NVRTC (package cuda-bindings) and no nvcc here"


@dataclass(frozen=True)
class Job:
    """Number `index` of what `function` of a module yields, for one architecture."""

    module: str
    function: str
    index: int
    target: int


@dataclass(frozen=True)
class Report:
    """What became of it; `error` is empty where it compiled, `skipped` says why it was not tried."""

    kernel: str
    target: int
    seconds: float
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    error: str = ""
    skipped: str = ""

    def __str__(self) -> str:
        name = f"{self.kernel:60} sm_{self.target}"
        if self.error:
            return f"{name}  FAILED\n{self.error}"
        if self.skipped:
            return f"{name}  skipped: {self.skipped}"
        spills = f"  {self.spilled} bytes of a thread in local memory" if self.spilled else ""
        used = f"{self.registers:3} registers  {self.shared:6} bytes shared"
        return f"{name}  {used}  {self.seconds:5.1f} s{spills}"


def modules(names: Sequence[str] = ()) -> tuple[list[ModuleType], dict[str, str]]:
    """The modules of the package; and those that need a package which is not here, with its name."""
    package = importlib.import_module(PACKAGE)
    found, absent = [], {}
    for info in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
        if names and not any(name in info.name for name in names):
            continue
        try:
            found.append(importlib.import_module(info.name))
        except ModuleNotFoundError as error:
            if (error.name or "ninfer").split(".")[0] == "ninfer":
                raise
            absent[info.name] = str(error.name)
    return found, absent


def jobs(found: Iterable[ModuleType], targets: Sequence[int]) -> list[Job]:
    """Everything there is to compile."""
    return [
        Job(module.__name__, function, index, target)
        for module in found
        for function in ("specimens", "programs")
        if getattr(getattr(module, function, None), "__module__", None) == module.__name__
        for index, _ in enumerate(_items(module.__name__, function))
        for target in targets
    ]


@cache
def _items(module: str, function: str) -> list:
    return list(getattr(importlib.import_module(module), function)())


def uncovered(found: Iterable[ModuleType]) -> list[str]:
    """Sources with kernels of which no module offers a program."""
    offering = [module.__name__ for module in found if hasattr(module, "programs")]
    covered = {item.source for name in offering for item in _items(name, "programs")}
    folder = Path(importlib.import_module(PACKAGE).__path__[0]) / "csrc"
    sources = sorted(folder.glob("*.cu*"))
    return [path.name for path in sources if "__global__" in path.read_text() and path.name not in covered]


def compile_job(job: Job) -> Report:
    """Never raises: what went wrong stands in the report."""
    begin = time.perf_counter()
    short = job.module.removeprefix(f"{PACKAGE}.")
    name = f"{short}.{job.function}[{job.index}]"
    try:
        item = _items(job.module, job.function)[job.index]
        if job.function == "specimens":
            name = f"{short}.{item.kernel.__name__}[{job.index}]"
            code, shared = _compile_triton(item, job.target)
        else:
            name = f"{short}:{item.source}[{job.index}]"
            code, shared = _compile_cuda(item.source, item.defines, job.target), 0
            if code is None:
                return Report(name, job.target, 0.0, skipped=SKIPPED)
        usage = _resources(code)
    except Exception as error:
        seconds = time.perf_counter() - begin
        return Report(name, job.target, seconds, error=f"{type(error).__name__}: {error}")
    registers, spilled, static = usage
    return Report(name, job.target, time.perf_counter() - begin, registers, spilled, max(shared, static))


def _compile_triton(specimen, target: int) -> tuple[bytes, int]:
    """(machine code, bytes of shared memory)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = specimen.kernel
    constants = dict(specimen.constants)
    if "EARLY" in kernel.arg_names:
        constants.setdefault("EARLY", target >= 90)
    types = {name: specimen.signature.get(name, "constexpr") for name in kernel.arg_names}
    unknown = (specimen.signature.keys() | constants.keys()) - types.keys()
    missing = [n for n, kind in types.items() if kind == "constexpr" and n not in constants]
    if unknown or missing:
        raise ValueError(f"the specimen has unknown arguments {sorted(unknown)} and lacks {missing}")
    # As at run time: pointers begin at multiples of 16 bytes, but for those that the kernel excepts.
    attributes = {
        (parameter.num,): [["tt.divisibility", 16]]
        for parameter in kernel.params
        if types[parameter.name].startswith("*") and not parameter.do_not_specialize_on_alignment
    }
    source = ASTSource(kernel, types, constants, attributes)  # pyright: ignore[reportCallIssue]
    options = dict(specimen.options)
    if constants.get("EARLY"):
        options["launch_pdl"] = True
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return compiled.asm["cubin"], compiled.metadata.shared


def _compile_cuda(source: str, defines: dict, target: int) -> bytes | None:
    """None where no compiler is here."""
    compiler = importlib.import_module(f"{PACKAGE}.compile")
    architecture = f"sm_{target}{'a' if target == 90 else ''}"
    if _has_nvrtc():
        return compiler.compile_source(source, defines, architecture)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernel.cubin"
        number = architecture.removeprefix("sm_")
        command = [
            nvcc, "-cubin", "-std=c++17", f"-gencode=arch=compute_{number},code=sm_{number}",
            *(f"-D{key}={value}" for key, value in defines.items()),
            "-x", "cu", str(compiler.SOURCES / source), "-o", str(out),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"nvcc: {done.stderr.strip() or done.stdout.strip()}")
        return out.read_bytes()


@cache
def _has_nvrtc() -> bool:
    try:
        from cuda.bindings import nvrtc  # pyright: ignore[reportMissingImports]

        return int(nvrtc.nvrtcVersion()[0]) == 0
    except (ImportError, RuntimeError):
        return False


def _resources(code: bytes) -> tuple[int, int, int]:
    """(registers, bytes of local memory, bytes of shared memory), the most of all kernels in the code."""
    import triton

    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = str(tool) if tool.exists() else shutil.which("cuobjdump")
    if command is None:
        return 0, 0, 0
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        text = subprocess.run(
            [command, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout

    def most(name: str) -> int:
        return max(map(int, re.findall(rf"\b{name}:(\d+)", text)), default=0)

    return most("REG"), most("STACK") + most("LOCAL"), most("SHARED")


def run(work: Sequence[Job], processes: int) -> Iterable[Report]:
    """Reports as they come."""
    if processes < 2 or len(work) < 2:
        yield from map(compile_job, work)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(compile_job, work)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only modules with such names")
    parser.add_argument("--targets", default="80,90", help="compute capabilities, e.g. 80,90")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the reports to this file too")
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    found, absent = modules(options.names)
    for name, package in absent.items():
        print(f"{name} is left out: it needs {package}")
    for name in [] if options.names else uncovered(found):
        print(f"csrc/{name} is left out: no module offers programs of it")
    reports, targets = [], [int(target) for target in options.targets.split(",")]
    for report in run(jobs(found, targets), options.processes):
        print(report, flush=True)
        reports.append(report)
    failed = sum(bool(report.error) for report in reports)
    skipped = sum(bool(report.skipped) for report in reports)
    print(
        f"{len(reports) - failed - skipped} compiled, {failed} failed, {skipped} skipped "
        f"in {time.perf_counter() - begin:.1f} s"
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(report) for report in reports], indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
