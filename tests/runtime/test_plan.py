"""What a plan counts is what is taken, and what can't be is refused with numbers and a remedy."""

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ninfer import models
from ninfer.artifact import Artifact
from ninfer.convert import ensure_artifact
from ninfer.errors import CapacityError, FormatError, OptionError
from ninfer.formats import KvFormat
from ninfer.models import KvLayout, Model, StateLayout
from ninfer.ops import PAGE
from ninfer.ops.cpu import amx
from ninfer.runtime import Limits, Plan, Program, plan_model
from ninfer.runtime.plan import make_plan
from tests.models import mtp
from tests.models.loaded import GEOMETRIES, loaded

from .hand import Hand, Lane, planes
from .toy import ToyModel

MODELS = pytest.mark.parametrize("name", GEOMETRIES)
MIB = 1 << 20


def plan_of(limits: Limits, available: int | None = None, kv: KvLayout | None = None) -> Plan:
    """Of a model with pages of 32 KiB and slots of 8,192 + 384 bytes."""
    return make_plan(
        kv or KvLayout(2, 2, 32, torch.bfloat16),
        StateLayout(2, 3, 32, 2, 2, 32, 16, torch.bfloat16),
        limits,
        context_limit=4096,
        public_tokens=1000,
        workspace_bytes=MIB,
        weight_bytes=5 * MIB,
        available_bytes=available,
    )


def nbytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@MODELS
@pytest.mark.parametrize("kv_format", list(KvFormat))
@pytest.mark.parametrize(
    "limits",
    [
        Limits(1000, 256),
        Limits(130, 128, max_concurrency=3, kv_capacity=700, state_slots=0),
        Limits(64, 128, max_concurrency=8, state_slots=9, width=4),
    ],
)
def test_every_figure_is_what_is_allocated(name: str, kv_format: KvFormat, limits: Limits) -> None:
    program = Program(loaded(name), plan := plan_model(loaded(name), limits, kv_format=kv_format))
    cache, records = program._cache, program._records
    assert plan.kv_bytes == nbytes(plane for pages in cache.kv for plane in planes(pages))
    assert plan.slots * plan.slot_bytes == nbytes([*cache.conv, *cache.recurrent])
    taken = 0
    if records is not None:
        taken = nbytes([*records.conv, *(plane for layer in records.delta for plane in planes(layer))])
    assert plan.record_bytes == taken
    assert (plan.record_bytes > 0) == (limits.width > 1 and name == "qwen3.5")
    both_sides = 2 * (program.ingress.nbytes + program._egress.nbytes)
    assert plan.buffer_bytes == both_sides + program._counts.nbytes
    parts = plan.kv_bytes + plan.slots * plan.slot_bytes + plan.record_bytes + plan.buffer_bytes
    assert plan.total_bytes == parts + plan.workspace_bytes


def test_pages_and_slots() -> None:
    """What lanes and the cache have to share."""
    plan = plan_of(Limits(1000, 256, max_concurrency=3))
    assert (plan.pages, plan.copies, plan.slots, plan.snapshots) == (16, 3, 6 + 7, 7)
    assert (plan.prefill_chunk, plan.concurrency, plan.shape.pages) == (256, 3, 16)
    assert (plan.kv.page_bytes, plan.slot_bytes) == (32 << 10, 8576)
    # Every request needs a page, however short the context; a chunk is no longer than that.
    short = plan_of(Limits(100, 256, max_concurrency=8, state_slots=2))
    assert (short.pages, short.prefill_chunk, short.slots, short.snapshots) == (8, 100, 18, 2)
    assert plan_of(Limits(1000, 256, kv_capacity=1000)).pages == 16
    assert plan_of(Limits(1000, 256, kv_capacity=1025)).pages == 17
    attention_only = plan_model(ToyModel(recurrent=False), Limits(256, 128, max_concurrency=2, state_slots=5))
    assert (attention_only.slots, attention_only.snapshots, attention_only.slot_bytes) == (0, 0, 0)


def test_the_table_shown_at_start() -> None:
    text = str(plan_of(Limits(1000, 256, max_concurrency=3, kv_capacity=2000, width=3)))
    lines = text.splitlines()
    assert lines[0] == "3 requests of 1,000 tokens at most, 2,048 in all, prefill chunks of 256"
    rows = {line[:15].strip(): line[15:].split() for line in lines[1:]}
    assert list(rows) == [
        "weights", "KV bf16", "state slots", "round records", "buffers", "workspace", "total",
    ]  # fmt: skip
    assert rows["weights"] == ["5.00", "MiB"]
    assert rows["KV bf16"] == ["32", "+", "3", "pages", "of", "0.03", "MiB", "1.09", "MiB"]
    assert rows["state slots"] == ["6", "+", "7", "of", "0.01", "MiB", "0.11", "MiB"]
    total = sum(float(values[-2]) for name, values in rows.items() if name != "total")
    assert float(rows["total"][-2]) == pytest.approx(total, abs=0.04)


@pytest.mark.parametrize(
    ("kv_format", "one", "page"),
    [
        (KvFormat.BF16, 65536, 4.0),
        (KvFormat.INT8, 33792, 2.0625),
        (KvFormat.FP8, 33024, 2.015625),
        (KvFormat.K8V4, 25728, 1.5703125),
        (KvFormat.NVFP4, 18432, 1.125),
    ],
)
def test_page_bytes_of_the_27b(kv_format: KvFormat, one: int, page: float) -> None:
    layout = KvLayout(16, 4, 256, torch.bfloat16, kv_format)
    assert layout.page_bytes == PAGE * one == page * MIB


def test_auto_takes_what_memory_allows() -> None:
    limits = Limits(1000, 256, max_concurrency=2, kv_capacity="auto")
    least = plan_of(replace(limits, kv_capacity=None))
    headroom = 1 << 30
    exact = plan_of(limits, available=least.total_bytes + headroom)
    assert exact == least
    more = plan_of(limits, available=least.total_bytes + headroom + 10 * (32 << 10) + 5)
    assert more.pages == least.pages + 10
    small = plan_of(replace(limits, headroom=MIB), available=least.total_bytes + 3 * MIB)
    assert small.pages == least.pages + 64
    with pytest.raises(CapacityError) as caught:
        plan_of(limits, available=least.total_bytes + headroom - 1)
    for part in ("--kv-capacity auto", "1,024.00 MiB of headroom", "MiB are free", "lower --max-context"):
        assert part in str(caught.value)
    with pytest.raises(OptionError, match="auto needs to know the free memory; give a number of tokens"):
        plan_of(limits)


@pytest.mark.parametrize(
    ("limits", "error", "text"),
    [
        (Limits(0), OptionError, r"--max-context must be at least 1, not 0"),
        (Limits(-5), OptionError, r"--max-context must be at least 1, not -5"),
        (Limits(4097), CapacityError, r"--max-context 4097 is more than the 4096 positions"),
        (Limits(256, 0), OptionError, r"--prefill-chunk must be a positive multiple of 128, not 0"),
        (Limits(256, 100), OptionError, r"multiple of 128, not 100"),
        (Limits(256, -128), OptionError, r"multiple of 128, not -128"),
        (Limits(256, max_concurrency=0), OptionError, r"--max-concurrency must be between 1 and 8, not 0"),
        (Limits(256, max_concurrency=9), OptionError, r"--max-concurrency must be between 1 and 8, not 9"),
        (
            Limits(256, max_concurrency=1 << 40),
            OptionError,
            r"--max-concurrency must be between 1 and 8, not 1099511627776",
        ),
        (Limits(256, state_slots=-1), OptionError, r"--device-state-slots must not be negative, not -1"),
        (
            Limits(256, kv_capacity=255),
            OptionError,
            r"--kv-capacity must be at least --max-context: 255 is less than 256",
        ),
    ],
)
def test_refused_options(limits: Limits, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        plan_of(limits)
    with pytest.raises(error, match=text):
        plan_model(ToyModel(), limits)


def test_what_does_not_fit_is_refused_with_its_parts() -> None:
    limits = Limits(1000, 256, max_concurrency=2)
    plan = plan_of(limits)
    assert plan_of(limits, available=plan.total_bytes) == plan
    with pytest.raises(CapacityError) as caught:
        plan_of(limits, available=plan.total_bytes - 1)
    text = str(caught.value)
    assert "KV 0.56 MiB, states 0.08 MiB" in text
    assert text.endswith("are free; lower --max-context, --max-concurrency or --device-state-slots")
    with pytest.raises(CapacityError, match=r"lower --kv-capacity \(at least 1000\), --max-context"):
        plan_of(replace(limits, kv_capacity=2000), available=plan.total_bytes)


def test_free_memory_counts_without_mapped_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    need = plan_model(ToyModel(), limits := Limits(256, 128)).total_bytes
    monkeypatch.setattr("ninfer.runtime.program.available_bytes", lambda device: need + 1000)
    assert plan_model(ToyModel(), limits, weight_bytes=1000).total_bytes == need
    with pytest.raises(CapacityError, match="lower --max-context"):
        plan_model(ToyModel(), limits, weight_bytes=1001)


def test_a_head_that_a_format_cannot_store_is_refused() -> None:
    """The toy's heads have one dimension."""
    with pytest.raises(FormatError, match="multiple of 32"):
        Program(ToyModel(), plan_model(ToyModel(), Limits(128), kv_format=KvFormat.INT8))


# Workspace


class Live(TorchDispatchMode):
    """Bytes of the tensors made under it that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in inputs and storage._cdata not in self._known:
                self._known[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._drop, storage._cdata)
        return result

    def _drop(self, key: int) -> None:
        self.now -= self._known.pop(key)


def _tensors(tree: object) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def peak_of(hand: Hand, begin: int, columns: int) -> int:
    """Bytes that a prefill of so many columns takes, with the draw after it."""
    pages = range(hand.shape.pages)
    tokens = [(31 * i * i + 7) % 190 for i in range(columns)]
    hand.prefill(Lane(pages), tokens[:16])
    with Live() as live:
        hand.prefill(Lane(pages, frontier=begin), tokens, draw=True)
    return live.peak


def assert_bounded(model: Model, columns: int, context: int) -> None:
    hand = Hand(model, context=context, chunk=columns, snapshots=0)
    peak = max(peak_of(hand, begin, columns) for begin in {0, context - columns})
    bound = model.workspace_bytes(columns, context)
    assert peak <= bound, bound / peak
    if not amx.available():  # which needs no decoded panels
        assert bound <= 3 * peak, bound / peak


@MODELS
@pytest.mark.parametrize(("columns", "context"), [(128, 128), (128, 2048), (1024, 1024), (1024, 4096)])
def test_workspace_is_a_bound(name: str, columns: int, context: int) -> None:
    assert_bounded(loaded(name), columns, context)


@pytest.mark.parametrize("name", ["irregular", "threefold", "wide-value", "all-full", "llama-many"])
def test_workspace_of_irregular_geometries_is_a_bound(name: str, tmp_path: Path) -> None:
    from tests.models.draft import draft
    from tests.models.test_transformers import GEOMETRIES as IRREGULAR
    from tests.models.tiny import build

    with Artifact.open(
        draft(IRREGULAR[name], build(IRREGULAR[name])).write(tmp_path / "a.ninfer")
    ) as artifact:
        assert_bounded(models.load(artifact), 128, 512)


@pytest.mark.parametrize("columns", [128, 1024])
def test_workspace_of_smollm2_is_a_bound(smollm2: Path, tmp_path: Path, columns: int) -> None:
    with Artifact.open(ensure_artifact(smollm2, cache_dir=tmp_path)) as artifact:
        assert_bounded(models.load(artifact), columns, 2 * columns)


@MODELS
@pytest.mark.parametrize("width", [1, 2])
def test_recorded_rounds_are_counted(name: str, width: int) -> None:
    """What recordings keep is in the plan, and the plan isn't three times as much."""
    model = loaded(name)
    hand = Hand(model, rows=8, width=width, context=1024)
    with Live() as live:
        hand.program.warm_up()
    counted = hand.plan.workspace_bytes - model.workspace_bytes(128, 1024)
    assert live.now <= counted <= 3 * live.now, counted / live.now


@pytest.mark.parametrize("name", ["mixed", "all-full", "all-linear"])
@pytest.mark.parametrize("width", [2, 4])
def test_a_predictor_is_counted(name: str, width: int) -> None:
    """Its layer of KV, hidden states, recordings, and what prefills take."""
    model, plain = mtp.loaded(name), mtp.loaded(name, predictor=False)
    limits = Limits(1024, 128, max_concurrency=8, kv_capacity=8192, width=width)
    plan, without = plan_model(model, limits), plan_model(plain, limits)
    assert plan.kv.layers == without.kv.layers + 1
    assert plan.slot_bytes == without.slot_bytes + 2 * model.hidden_size
    assert plan.buffer_bytes > without.buffer_bytes + 4 * 8 * (width - 1) * model.public_tokens
    program = Program(model, plan)
    with Live() as live:
        program.warm_up()
    peak = max(peak_of(Hand(model, width=width, context=1024), begin, 128) for begin in (0, 896))
    assert peak + live.now <= plan.workspace_bytes <= 3 * (peak + live.now)
