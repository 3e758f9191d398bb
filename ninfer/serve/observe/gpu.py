"""What NVML says of the engine's GPUs: clocks, power, energy, temperature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ninfer.serve.observe.startup import Gpu

_REASONS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
)


class Gpus:
    """The devices with the given UUIDs and numbers, rank 0 first; `Gpus.open` finds them.

    Methods ask the driver, which may take milliseconds: call them outside an event loop.
    """

    def __init__(self, nvml: Any, devices: Sequence[int], uuids: Sequence[str]) -> None:
        """Raises what NVML raises for a device that it doesn't know."""
        self._nvml, self._devices, self._uuids = nvml, devices, uuids
        self._handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        self._energy: list[int | None] = [None] * len(uuids)

    @classmethod
    def open(cls, devices: Sequence[int], uuids: Sequence[str], nvml: Any = None) -> Gpus | None:
        """None without GPUs to look at, without NVML, or if it doesn't know one of them. `nvml` is the module
        `pynvml` or one like it."""
        if not uuids:
            return None
        try:
            if nvml is None:
                import pynvml as nvml
            nvml.nvmlInit()
        except Exception:
            return None
        names = [uuid if uuid.startswith("GPU-") else f"GPU-{uuid}" for uuid in uuids]
        try:
            return cls(nvml, devices, names)
        except Exception:
            _try(nvml.nvmlShutdown)
            return None

    def close(self) -> None:
        if self._handles:
            self._handles = []
            _try(self._nvml.nvmlShutdown)

    def describe(self) -> Gpu:
        """The first device."""
        nvml, handle = self._nvml, self._handles[0]
        memory = _try(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
        major, minor = _try(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle)) or (0, 0)
        driver = _try(lambda: nvml.nvmlSystemGetCudaDriverVersion()) or 0
        return Gpu(
            name=_text(_try(lambda: nvml.nvmlDeviceGetName(handle))),
            uuid=self._uuids[0],
            memory=memory or 0,
            major=major,
            minor=minor,
            driver=f"{driver // 1000}.{driver % 1000 // 10}" if driver else "",
        )

    def sample(self) -> list[dict[str, Any]]:
        """The `gpus` of a throughput record. Energy is what was used since the last sample."""
        return [self._sample(rank, handle) for rank, handle in enumerate(self._handles)]

    def _sample(self, rank: int, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        power = _try(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        energy = _try(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        before, self._energy[rank] = self._energy[rank], energy
        used = None if energy is None or before is None or energy < before else (energy - before) / 1000
        bits = _try(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return {
            "device": self._devices[rank],
            "sm_clock_mhz": _try(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": _try(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            "power_watts": None if power is None else power / 1000,
            "energy_joules": used,
            "temperature_celsius": _try(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            "clock_event_reasons": None if bits is None else reasons(bits),
        }


def reasons(bits: int) -> list[str]:
    """Names of the set bits, lowest first; unknown ones in hexadecimal."""
    return [
        _REASONS[bit] if bit < len(_REASONS) else hex(1 << bit)
        for bit in range(bits.bit_length())
        if bits >> bit & 1
    ]


def _try(ask: Callable[[], Any]) -> Any:
    """None for what this device or driver doesn't tell."""
    try:
        return ask()
    except Exception:
        return None


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
