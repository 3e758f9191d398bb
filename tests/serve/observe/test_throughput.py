"""Intervals by a clock that the test moves; their numbers; GPUs by a driver that is made up."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.engine import RuntimeStatistics
from ninfer.events import FinishReason
from ninfer.serve.observe.gpu import Gpus, reasons
from ninfer.serve.observe.interval import busy, difference, interval_record
from ninfer.serve.observe.throughput import Throughput
from tests.serve.observe import schema
from tests.serve.observe.made import FakeLink


class Clock:
    """Time that passes only in `sleep`; each sleep also ends the test's patience after `limit` of them."""

    def __init__(self, limit: int) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []
        self.late: dict[int, float] = {}
        """Seconds by which a sleep (counted from 0) takes longer."""
        self._limit = limit
        self.ended = asyncio.Event()

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if len(self.sleeps) == self._limit:
            self.ended.set()
            await asyncio.Event().wait()
        self.now += seconds + self.late.get(len(self.sleeps), 0.0)
        self.sleeps.append(seconds)
        await asyncio.sleep(0)


def run(link: FakeLink, clock: Clock, **changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(shown on the console, logged) of an engine whose looks come one an interval."""
    shown: list[dict[str, Any]] = []
    logged: list[dict[str, Any]] = []

    async def main() -> None:
        intervals = Throughput(
            link, 5.0, shown.append, logged.append, clock=clock, sleep=clock.sleep, **changes
        )
        intervals.start()
        await asyncio.wait_for(clock.ended.wait(), 10)
        clock.now += 1.25
        await intervals.close()
        await intervals.close()

    asyncio.run(main())
    return shown, logged


def counted(prefill: int, decode: int = 0, **changes: Any) -> RuntimeStatistics:
    return RuntimeStatistics(prefill_tokens=prefill, decode_tokens=decode, rounds=decode, **changes)


def test_each_interval_tells_the_difference_and_silent_ones_nothing() -> None:
    link = FakeLink(
        counted(10),  # the beginning: warm-up doesn't count
        counted(110, 50),
        counted(110, 50),  # silent
        counted(110, 80),
        counted(130, 80),  # at the end
    )
    clock = Clock(3)
    shown, logged = run(link, clock)
    assert clock.sleeps == [5.0, 5.0, 5.0]
    tokens = [tuple(one["tokens"].values()) for one in logged]
    assert tokens == [(100, 50), (0, 30), (20, 0)]
    assert [one["interval_seconds"] for one in logged] == [5.0, 5.0, 1.25]
    assert logged[0]["throughput_tokens_per_second"] == {"prefill": 20.0, "decode": 10.0}
    assert shown == logged[:2]  # the last, partial one only to the log


def test_deadlines_are_absolute_and_missed_ones_are_skipped() -> None:
    clock = Clock(4)
    clock.late = {0: 1.0, 1: 12.0}
    link = FakeLink(*(counted(i) for i in range(10)))
    _, logged = run(link, clock)
    # 105 (+1) | 110 (+12, so 115 and 120 are missed) | 125 | 130
    assert clock.sleeps == [5.0, 4.0, 3.0, 5.0]
    assert [one["interval_seconds"] for one in logged[:4]] == [6.0, 16.0, 3.0, 5.0]


def test_an_engine_that_does_not_answer_costs_one_interval(caplog: pytest.LogCaptureFixture) -> None:
    link = FakeLink(counted(0), RuntimeError("my secret"), counted(30), counted(30))
    _, logged = run(link, Clock(2))
    [only] = logged
    assert (only["tokens"]["computed_prefill"], only["interval_seconds"]) == (30, 10.0)
    assert [r.getMessage() for r in caplog.records] == ["throughput is not known | RuntimeError"]


def test_an_engine_that_is_loaded_again_counts_from_zero() -> None:
    class Link(FakeLink):
        async def statistics(self) -> RuntimeStatistics | None:
            look = await super().statistics()
            if look is not None and look.prefill_tokens == 40:
                self.info = type(self.info)(**{**vars(self.info), "process": 4712})
            return look

    link = Link(counted(1000), counted(1100), None, counted(40), counted(50), counted(50))
    _, logged = run(link, Clock(4))
    assert [one["tokens"]["computed_prefill"] for one in logged] == [100, 40, 10]


def test_a_dead_engine_does_not_hold_up_the_end() -> None:
    link = FakeLink(counted(0), counted(1), RuntimeError("gone"))
    shown, logged = run(link, Clock(1))
    assert len(shown) == len(logged) == 1


# Numbers


def test_a_full_interval_follows_the_schema() -> None:
    now = RuntimeStatistics(
        finished={FinishReason.STOP_TOKEN: 2}, selections={"root": 1, "private_endpoint": 4},
        last_frontier=640, reused_tokens=900, copied_pages=3, captures_completed=5, captures_aborted=1,
        prefill_tokens=100, decode_tokens=60, prefill_units=4, control_units=1, rounds=30, row_rounds=60,
        evicted_blocks=7, evicted_snapshots=2, engine_boundary=0.1, program_submit=0.2, program_post=0.3,
        engine_commit_output=0.4, engine_maintenance=0.5, prefill_seconds=1.0, prefill_device_seconds=0.7,
        decode_seconds=3.0, decode_device_seconds=2.4, control_seconds=0.2, control_device_seconds=0.1,
        waiting=1, running=2, prefilling=1, decode_ready=1, free_pages=30, active_pages=20, used_slots=6,
    )  # fmt: skip
    gpus = Gpus.open([0], ["GPU-1"], nvml())
    assert gpus is not None
    line = interval_record(RuntimeStatistics(), now, 5.0, 130, gpus.sample())
    schema._check(line, schema.THROUGHPUT, "throughput")
    work = line["host_work"]
    assert work["elapsed_seconds"]["total"] == pytest.approx(1.5)
    assert work["device_wait_seconds"] == pytest.approx(3.2)
    assert work["work_class_seconds"] == {
        "decode_host": pytest.approx(0.6),
        "decode_device_wait": 2.4,
        "prefill_host": pytest.approx(0.3),
        "prefill_device_wait": 0.7,
        "control_host": pytest.approx(0.1),
        "control_device_wait": 0.1,
    }
    assert work["units"] == {"prefill": 4, "control": 1}
    assert work["decode_host_microseconds_per_round"] == pytest.approx(20_000)
    assert work["decode_host_microseconds_per_row_round"] == pytest.approx(10_000)
    assert work["decode_device_wait_microseconds_per_round"] == pytest.approx(80_000)
    assert line["decode_batch"] == {"rounds": 30, "row_rounds": 60, "average_size": 2.0}
    assert line["scheduler"]["decode_ready"] == 1
    cache = line["context_cache"]
    assert cache["captures"] == {"completed": 5, "aborted": 1}
    assert (cache["selections"]["root"], cache["selections"]["private_endpoint"]) == (1, 4)
    assert cache["selections"]["reused_prompt_tokens"] == 900
    assert cache["last_selection"] == {"frontier_tokens": 640}
    assert cache["pressure"]["partial_tail_cow_pages"] == 3
    assert cache["pressure"]["shared_owners_evicted"] == 7
    assert cache["pressure"]["checkpoints_dropped"] == 2
    assert cache["occupancy"]["device_main_kv_pages"] == 100
    assert cache["occupancy"]["device_state_slots"] == 6


def test_nothing_is_divided_by_zero() -> None:
    line = interval_record(RuntimeStatistics(), RuntimeStatistics(), 5.0, 0, None)
    schema._check(line, schema.THROUGHPUT, "throughput")
    assert line["decode_batch"]["average_size"] is None
    assert line["host_work"]["decode_host_microseconds_per_round"] is None


@st.composite
def engines(draw: st.DrawFn) -> RuntimeStatistics:
    values: dict[str, Any] = {}
    for each in fields(RuntimeStatistics):
        if each.name == "finished":
            values[each.name] = draw(st.dictionaries(st.sampled_from(FinishReason), st.integers(0, 9)))
        elif each.name == "selections":
            values[each.name] = draw(st.dictionaries(st.sampled_from(["root"]), st.integers(0, 9)))
        elif isinstance(each.default, float):
            values[each.name] = draw(st.floats(0, 9))
        else:
            values[each.name] = draw(st.integers(0, 9))
    return RuntimeStatistics(**values)


@given(engines(), engines())
def test_differences_are_never_negative(before: RuntimeStatistics, now: RuntimeStatistics) -> None:
    change = difference(before, now)
    for each in fields(RuntimeStatistics):
        value = getattr(change, each.name)
        assert all(v >= 0 for v in value.values()) if isinstance(value, dict) else value >= 0
    assert (change.running, change.last_frontier) == (now.running, now.last_frontier)
    schema._check(interval_record(before, now, 1.0, 9, None), schema.THROUGHPUT, "throughput")


@pytest.mark.parametrize(
    "change",
    [{"running": 1}, {"waiting": 1}, {"rounds": 1}, {"prefill_tokens": 1}, {"failed": 1}, {"admitted": 1},
     {"control_tokens": 1}, {"finished": {FinishReason.CANCELLED: 1}}],
)  # fmt: skip
def test_what_counts_as_activity(change: dict[str, Any]) -> None:
    assert busy(RuntimeStatistics(), RuntimeStatistics(**change))
    assert not busy(RuntimeStatistics(), RuntimeStatistics(engine_boundary=1.0, cached_blocks=4))


# GPUs


def nvml(**broken: Callable[..., Any]) -> Any:
    """A stand-in for the module `pynvml` with one H200 whose energy counter moves by 2.5 J a look."""
    energy = iter(range(1000, 10**6, 2500))

    def handle(uuid: str) -> str:
        if uuid != "GPU-1":
            raise RuntimeError("not found")
        return uuid

    answers: dict[str, Any] = {
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": handle,
        "nvmlDeviceGetClockInfo": lambda handle, kind: {1: 1980, 2: 3201}[kind],
        "nvmlDeviceGetPowerUsage": lambda handle: 345_600,
        "nvmlDeviceGetTotalEnergyConsumption": lambda handle: next(energy),
        "nvmlDeviceGetTemperature": lambda handle, sensor: 51,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0b101,
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=150 << 30),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlSystemGetCudaDriverVersion": lambda: 13_010,
        **broken,
    }
    return types.SimpleNamespace(**answers)


def _refuse(*_: Any) -> Any:
    raise RuntimeError("not supported")


def test_gpus_are_found_by_uuid_and_sampled() -> None:
    gpus = Gpus.open([3], ["1"], nvml())
    assert gpus is not None
    first, second = gpus.sample() + gpus.sample()
    assert first == {
        "device": 3, "sm_clock_mhz": 1980, "memory_clock_mhz": 3201, "power_watts": 345.6,
        "energy_joules": None, "temperature_celsius": 51, "clock_event_reasons": ["gpu_idle", "sw_power_cap"],
    }  # fmt: skip
    assert second["energy_joules"] == 2.5
    about = gpus.describe()
    assert (about.name, about.uuid, about.memory) == ("NVIDIA H200", "GPU-1", 150 << 30)
    assert (about.major, about.minor, about.driver) == (9, 0, "13.1")
    gpus.close()
    assert gpus.sample() == []


def test_energy_is_unknown_after_the_counter_was_reset() -> None:
    values = iter((5000, 7000, 100))
    gpus = Gpus.open([0], ["GPU-1"], nvml(nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(values)))
    assert gpus is not None
    assert [gpus.sample()[0]["energy_joules"] for _ in range(3)] == [None, 2.0, None]


def test_what_a_device_does_not_tell_is_null() -> None:
    names = [name for name in vars(nvml()) if name.startswith(("nvmlDeviceGet", "nvmlSystemGet"))]
    names.remove("nvmlDeviceGetHandleByUUID")
    gpus = Gpus.open([0], ["GPU-1"], nvml(**dict.fromkeys(names, _refuse)))
    assert gpus is not None
    [only] = gpus.sample()
    assert [value for name, value in only.items() if name != "device"] == [None] * 6
    assert (gpus.describe().name, gpus.describe().driver) == ("", "")


def test_without_nvml_or_with_other_devices_there_is_nothing() -> None:
    assert Gpus.open([], [], nvml()) is None
    assert Gpus.open([0], ["GPU-1"], nvml(nvmlInit=_refuse)) is None
    assert Gpus.open([0], ["GPU-2"], nvml(nvmlShutdown=_refuse)) is None


def test_reasons_by_bit() -> None:
    assert reasons(0) == []
    assert reasons(0x1FF) == [
        "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost",
        "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clock_setting",
    ]  # fmt: skip
    assert reasons(0x200 | 1 << 40) == ["0x200", "0x10000000000"]


def test_gpus_are_sampled_in_silent_intervals_too() -> None:
    gpus = Gpus.open([0], ["GPU-1"], nvml())
    _, logged = run(FakeLink(counted(0), counted(0), counted(7), counted(7)), Clock(2), gpus=gpus)
    [only] = logged
    assert only["gpus"][0]["energy_joules"] == 2.5
