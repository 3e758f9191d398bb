"""CUDA C++ of `csrc/`, compiled at run time: NVRTC makes machine code for the device at hand, kept on disk.

    module = Module("small.cuh", {"NT": 1})
    function = module.function("small_linear", device, shared_bytes)
    function.launch((132,), (256,), (x, out, 5120), pdl=True)

Launches go to torch's current stream and can be captured. Nothing is compiled or loaded before the first call
of `function`, which therefore must come before a capture.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ninfer.errors import EngineError
from ninfer.folders import cache_folder

SOURCES = Path(__file__).parent / "csrc"

_OPTIONS = ("--std=c++17", "-default-device", "-lineinfo")


class CompileError(EngineError):
    """A kernel cannot be compiled or loaded."""


@cache
def _bindings() -> tuple[Any, Any]:
    try:
        from cuda.bindings import driver, nvrtc  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise CompileError(
            f"kernels for CUDA need the package cuda-bindings with NVRTC ({error}); install ninfer[cuda]"
        ) from None
    return driver, nvrtc


def _check(result: tuple, what: str) -> Any:
    """The values of a call, whose first is its status."""
    status, *values = result
    if int(status) != 0:
        raise CompileError(f"{what} failed: {getattr(status, 'name', status)}")
    return values[0] if len(values) == 1 else values


@cache
def architecture(device: int) -> str:
    """What to compile for: `sm_80`, or `sm_90a` on Hopper."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major == 9 else ''}"


@cache
def _sources() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(SOURCES.glob("*.cuh"))}


def compile_source(source: str, defines: Mapping[str, int | str], arch: str) -> bytes:
    """Machine code (cubin) of a file of `csrc/` for `arch`, from the cache or from NVRTC."""
    files = _sources()
    options = [*_OPTIONS, f"-arch={arch}", *(f"-D{name}={value}" for name, value in sorted(defines.items()))]
    _, nvrtc = _bindings()
    try:
        version = _check(nvrtc.nvrtcVersion(), "asking NVRTC for its version")
    except RuntimeError as error:  # the library itself is missing
        raise CompileError(f"NVRTC cannot be loaded: {error}") from None
    digest = hashlib.sha256(repr((source, options, version, sorted(files.items()))).encode()).hexdigest()
    kept = cache_folder() / "cuda" / f"{digest[:40]}.cubin"
    if kept.is_file():
        return kept.read_bytes()
    code = _compile(nvrtc, source, files, options)
    kept.parent.mkdir(parents=True, exist_ok=True)
    fresh = kept.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(code)
    fresh.replace(kept)
    return code


def _compile(nvrtc: Any, source: str, files: Mapping[str, bytes], options: Sequence[str]) -> bytes:
    names = [name.encode() for name in files]
    program = _check(
        nvrtc.nvrtcCreateProgram(files[source], source.encode(), len(names), list(files.values()), names),
        f"opening {source}",
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status) != 0:
            size = _check(nvrtc.nvrtcGetProgramLogSize(program), "reading the log")
            log = b" " * size
            _check(nvrtc.nvrtcGetProgramLog(program, log), "reading the log")
            text = log.decode(errors="replace").strip("\0 \n")
            raise CompileError(f"{source} does not compile with {' '.join(options)}:\n{text}")
        code = b" " * _check(nvrtc.nvrtcGetCUBINSize(program), f"reading the code of {source}")
        _check(nvrtc.nvrtcGetCUBIN(program, code), f"reading the code of {source}")
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class Module:
    """One source with its defines; compiled and loaded once for each device."""

    def __init__(self, source: str, defines: Mapping[str, int | str] | None = None) -> None:
        self.source = source
        self.defines = dict(defines or {})
        self._loaded: dict[int, Any] = {}
        self._functions: dict[tuple[str, int, int], Function] = {}

    def function(self, name: str, device: torch.device, shared_bytes: int = 0) -> Function:
        """The `extern "C"` kernel of this name, with dynamic shared memory of `shared_bytes`."""
        index = device.index if device.index is not None else torch.cuda.current_device()
        known = self._functions.get((name, index, shared_bytes))
        if known is None:
            known = Function(self._load(index), name, index, shared_bytes)
            self._functions[name, index, shared_bytes] = known
        return known

    def _load(self, device: int) -> Any:
        if device not in self._loaded:
            driver, _ = _bindings()
            code = compile_source(self.source, self.defines, architecture(device))
            with torch.cuda.device(device):
                torch.cuda.current_stream().synchronize()  # the context exists now
                self._loaded[device] = _check(driver.cuModuleLoadData(code), f"loading {self.source}")
        return self._loaded[device]


class Function:
    """A loaded kernel."""

    def __init__(self, module: Any, name: str, device: int, shared_bytes: int) -> None:
        driver, _ = _bindings()
        self.name, self.device, self.shared_bytes = name, device, shared_bytes
        self._handle = _check(driver.cuModuleGetFunction(module, name.encode()), f"finding the kernel {name}")
        # The handle is shared by all sizes of a kernel: a smaller one must not take from a larger one.
        if shared_bytes > self._attribute("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"):
            self._set("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", shared_bytes)
        if shared_bytes:
            self._set("CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT", 100)
        self._attributes: dict[tuple[bool, int], list[Any]] = {}
        self._clusters: dict[tuple[int, int], int] = {}

    @property
    def registers(self) -> int:
        return self._attribute("CU_FUNC_ATTRIBUTE_NUM_REGS")

    @property
    def local_bytes(self) -> int:
        """Stack frame and spills of a thread."""
        return self._attribute("CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES")

    def _set(self, name: str, value: int) -> None:
        driver, _ = _bindings()
        key = getattr(driver.CUfunction_attribute, name)
        _check(driver.cuFuncSetAttribute(self._handle, key, value), f"preparing the kernel {self.name}")

    def _attribute(self, name: str) -> int:
        driver, _ = _bindings()
        return _check(
            driver.cuFuncGetAttribute(getattr(driver.CUfunction_attribute, name), self._handle),
            f"asking for {name}",
        )

    def _launch_attributes(self, pdl: bool, cluster: int) -> list[Any]:
        known = self._attributes.get((pdl, cluster))
        if known is not None:
            return known
        driver, _ = _bindings()
        made = []
        if pdl:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            made.append(attribute)
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = cluster
            attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
            made.append(attribute)
        self._attributes[pdl, cluster] = made
        return made

    def most_clusters(self, threads: int, cluster: int) -> int:
        """How many clusters of `cluster` blocks of `threads` the device runs at a time."""
        known = self._clusters.get((threads, cluster))
        if known is None:
            driver, _ = _bindings()
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes = self.shared_bytes
            attributes = self._launch_attributes(False, cluster)
            config.attrs, config.numAttrs = attributes, len(attributes)
            result = driver.cuOccupancyMaxActiveClusters(self._handle, config)
            known = self._clusters[threads, cluster] = _check(result, f"asking for clusters of {self.name}")
        return known

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        pdl: bool = False,
        cluster: int = 1,
        stream: int | None = None,
    ) -> None:
        """Start the kernel on `stream`, or on torch's current one of this device.

        `args` in the kernel's order: tensors and None (their address), bool and int (`int`), float (`float`),
        ctypes values (as they are; 64-bit integers are `ctypes.c_int64`). With `pdl` it may start before the
        kernel ahead of it in the stream has ended (sm_90): it must wait (`griddepcontrol.wait`) before it
        touches anything that others write.
        """
        driver, _ = _bindings()
        values = [_argument(value) for value in args]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = (*block, 1, 1)[:3]
        config.sharedMemBytes = self.shared_bytes
        config.hStream = torch.cuda.current_stream(self.device).cuda_stream if stream is None else stream
        attributes = self._launch_attributes(pdl, cluster)
        if attributes:
            config.attrs = attributes
        config.numAttrs = len(attributes)
        status = driver.cuLaunchKernelEx(config, self._handle, ctypes.addressof(addresses), 0)
        _check(status, f"starting the kernel {self.name}")


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, int):
        return ctypes.c_int32(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    return value
