"""Recorded work does the same as the work itself, on whatever its buffers hold."""

from __future__ import annotations

import threading

import pytest
import torch

from ninfer import ops
from ninfer.errors import OptionError
from ninfer.formats import KvFormat
from ninfer.ops.cpu.recording import Tape
from tests.ops.weights import random_matrix

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def poisoned() -> None:
    """Not here: filling fresh memory is computing, and makes work unrecordable."""


class Step:
    """A little of everything: one attention and one delta-net block over fixed buffers."""

    def __init__(self, columns: int = 1) -> None:
        self.table, _ = random_matrix("q8_g32_fp16", 50, 96, 1)
        self.qkv, _ = random_matrix("ggml_q4_0", 96 + 64, 96, 2)
        self.out, _ = random_matrix("ggml_q8_0", 96, 96, 3)
        self.gate_up, _ = random_matrix("q4_g64_fp16", 128, 96, 4)
        self.down, _ = random_matrix("q5_g64_fp16", 96, 64, 5)
        self.control, _ = random_matrix("bf16", 4, 96, 6)
        self.norm = torch.rand(96).bfloat16()
        self.k, self.v = torch.zeros(8, 64, 2, 16).bfloat16(), torch.zeros(8, 64, 2, 16).bfloat16()
        self.pages = torch.randperm(8, dtype=torch.int32)[None]
        self.conv, self.states = torch.zeros(2, 3, 96).bfloat16(), torch.zeros(2, 4, 16, 8)
        self.slot = torch.zeros(1, dtype=torch.int32)
        self.tokens = torch.zeros(columns, dtype=torch.int32)
        self.positions = torch.zeros(columns, dtype=torch.int32)
        self.rope = ops.Rope(16, 1e4)
        self.weight, self.bias = torch.randn(4, 96).bfloat16(), torch.randn(4)

    def set(self, token: int, position: int) -> None:
        count = len(self.tokens)
        self.tokens[:] = (token + torch.arange(count)) % 50
        self.positions[:] = position + torch.arange(count)

    def __call__(self) -> torch.Tensor:
        count = len(self.tokens)
        x = ops.embedding(self.tokens, self.table)
        h = ops.rms_norm(x, self.norm, 1e-6, True)
        heads = ops.linear(h, self.qkv).view(count, 10, 16)
        q, k, v = heads.split_with_sizes((6, 2, 2), 1)
        pages = ops.KvPages(KvFormat.BF16, self.k, self.v), self.pages
        q = ops.qk_prepare(q, k, v, self.positions, self.rope, None, None, 1e-6, *pages, self.positions)
        a = ops.paged_attention(q, *pages, self.positions, 0.25).view(count, 96)
        x = ops.linear(ops.sigmoid_mul(a, h), self.out, residual=x)
        u = ops.causal_conv(x, self.weight, self.conv, self.slot, self.slot)
        g, beta = ops.gdn_gating(x, self.control, self.control, self.bias, self.bias)
        q, k, v = u[:, :16].view(count, 2, 8), u[:, 16:32].view(count, 2, 8), u[:, 32:].view(count, 4, 16)
        o = ops.gated_delta_net(q, k, v, g, beta, self.states, self.slot, self.slot)
        z = ops.gated_rms_norm(o, v, self.norm[:16], 1e-6).view(count, 64)
        x = ops.linear(z, self.down, residual=x)
        x = ops.linear(ops.linear_swiglu(x, self.gate_up), self.down, residual=x)
        return ops.logits(x, self.out, 90)


@pytest.mark.parametrize("columns", [1, 3, 7])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_replays_equal_the_work(columns: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.manual_seed(5)
    plain = Step(columns)
    torch.manual_seed(5)
    recorded = Step(columns)
    try:
        torch.set_num_threads(threads)
        recording = ops.Recording(recorded, CPU)
        with torch.inference_mode():
            for token, position in enumerate((0, 1, 2, 63, 64, 200, 300, 301, 20)):
                plain.set(3 * token, position)
                recorded.set(3 * token, position)
                assert torch.equal(recording(), plain()), f"call {token}"
    finally:
        torch.set_num_threads(before)
    assert recording.obstacle is None
    assert recording.recorded
    assert torch.equal(recorded.states, plain.states)
    assert torch.equal(recorded.conv, plain.conv)
    assert torch.equal(recorded.k, plain.k)


class Round(Step):
    """A verification of two requests with records, draws, a fold, and token counts; all choices are data."""

    def __init__(self) -> None:
        super().__init__(6)
        self.pages = torch.arange(8, dtype=torch.int32).view(2, 4)
        self.conv, self.states = torch.zeros(4, 3, 96).bfloat16(), torch.zeros(4, 4, 16, 8)
        self.sources = torch.tensor([-1, 0], dtype=torch.int32)
        self.targets = torch.tensor([2, 1], dtype=torch.int32)
        self.kept = torch.zeros(2, dtype=torch.int32)
        self.u = torch.zeros(6, 96).bfloat16()
        gates = (torch.zeros(6, 4) for _ in range(2))
        self.columns = ops.DeltaRecords(
            torch.zeros(6, 2, 8).bfloat16(), torch.zeros(6, 4, 16).bfloat16(), *gates
        )
        params = [ops.SamplingParams(frequency_penalty=0.5, seed=seed) for seed in range(6)]
        self.draws = ops.Draws.of(params, range(6), [1] * 6, [0, 0, 0, 1, 1, 1])
        self.counts = torch.zeros(2, 90, dtype=torch.int32)
        self.cleared = torch.full((2,), -1, dtype=torch.int32)
        self.masks = torch.zeros(3, 3, dtype=torch.int32)
        self.wanted = torch.zeros(6, dtype=torch.int32)
        self.logprob, self.top_logprobs = torch.zeros(6), torch.zeros(6, 20)
        self.top_ids = torch.zeros(6, 20, dtype=torch.int32)
        self.order = torch.tensor([2, 0, 3, 1], dtype=torch.int32)

    def set(self, token: int, position: int) -> None:
        super().set(token, position)
        self.positions[3:] = self.positions[:3]
        self.kept[:] = torch.tensor([position % 4, (position + 2) % 4])
        self.sources[:] = self.targets
        self.targets[:] = torch.tensor([position % 2, 2 + position % 2])
        self.draws.position[:] = self.positions
        self.draws.purpose[:] = torch.tensor([1, -1, 2, 3, 4, position % 3 - 1])
        self.cleared[0] = 1 if position % 5 == 0 else -1
        for row in range(3):
            self.masks[row] = 0x5A3C96 * (position + 3 * row) & 0x7FFFFFFF
        self.draws.mask_row[:] = torch.tensor([-1, 0, 1, position % 3, position % 4 - 1, 2])
        self.wanted[:] = torch.tensor([position % 21, -1, 3, -1, 20, position % 2 - 1])

    def __call__(self) -> torch.Tensor:
        x = ops.embedding(self.tokens, self.table)
        slots = self.sources, self.targets
        u = ops.causal_conv(x, self.weight, self.conv, *slots, self.u)
        g, beta = ops.gdn_gating(x, self.control, self.control, self.bias, self.bias)
        q, k, v = u[:, :16].view(6, 2, 8), u[:, 16:32].view(6, 2, 8), u[:, 32:].view(6, 4, 16)
        o = ops.gated_delta_net(q, k, v, g, beta, self.states, *slots, self.columns)
        z = ops.gated_rms_norm(o, v, self.norm[:16], 1e-6, self.order).view(6, 64)
        x = ops.linear(ops.linear_swiglu(x, self.two_formats), self.down, residual=ops.linear(z, self.down))
        ops.fold_conv(self.u, self.kept, self.conv, *slots)
        ops.fold_delta_net(self.columns, self.kept, self.states, *slots)
        ops.clear_counts(self.cleared, self.counts)
        logits = ops.logits(x, self.out, 90)
        tokens = ops.draw(logits, self.draws, self.counts, self.masks)
        ops.token_logprobs(logits, tokens, self.wanted, self.logprob, self.top_ids, self.top_logprobs)
        ops.count_tokens(tokens, self.draws.count_rows, self.counts)
        return tokens

    @property
    def two_formats(self) -> ops.Matrix:
        gate = ops.Matrix([ops.RowSpan(self.gate_up.spans[0].parent, 0, 64)])
        return ops.Matrix.stack((gate, ops.Matrix([ops.RowSpan(self.out.spans[0].parent, 0, 64)])))


@pytest.mark.parametrize("threads", [1, 3])
def test_rounds_are_replayed(threads: int) -> None:
    before = torch.get_num_threads()
    torch.manual_seed(6)
    plain = Round()
    torch.manual_seed(6)
    recorded = Round()
    seen: set[int] = set()
    try:
        torch.set_num_threads(threads)
        recording = ops.Recording(recorded, CPU)
        for position in (0, 1, 2, 63, 64, 200, 201, 205, 20, 21):
            plain.set(3 * position, position)
            recorded.set(3 * position, position)
            tokens = recording()
            assert torch.equal(tokens, plain())
            seen.update(tokens.tolist())
            for mine, other in (
                (recorded.states, plain.states), (recorded.conv, plain.conv), (recorded.counts, plain.counts),
                (recorded.logprob, plain.logprob), (recorded.top_ids, plain.top_ids),
                (recorded.top_logprobs, plain.top_logprobs),
            ):  # fmt: skip
                assert torch.equal(mine, other)
    finally:
        torch.set_num_threads(before)
    assert recording.obstacle is None
    assert recording.recorded
    assert plain.counts.sum() > 0
    assert plain.states.abs().sum() > 0
    assert len(seen) > 5
    assert (plain.logprob[[0, 2, 4]] < 0).all()


def test_the_result_is_one_tensor_with_new_contents() -> None:
    step = Step()
    recording = ops.Recording(step, CPU)
    recording()
    first = recording()
    copy = first.clone()
    step.set(9, 4)
    assert recording().data_ptr() == first.data_ptr()
    assert not torch.equal(first, copy)


def test_work_that_computes_in_pytorch_is_run_each_time() -> None:
    x, weight = torch.ones(2, 4), torch.ones(4)
    recording = ops.Recording(lambda: ops.rms_norm(x, weight, 0.0, False) * 2, CPU)
    for _ in range(3):
        assert torch.equal(recording(), torch.full((2, 4), 2.0))
    assert not recording.recorded
    assert recording.obstacle == "aten::mul"


def test_an_error_in_the_work_leaves_it_unrecorded() -> None:
    step = Step()
    recording = ops.Recording(step, CPU)
    step.tokens[0] = 77
    for _ in range(2):
        with pytest.raises(OptionError, match="77"):
            recording()
    step.tokens[0] = 7
    recording()
    recording()
    assert recording.recorded


def test_replays_in_several_python_threads() -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        step = Step()
        recording = ops.Recording(step, CPU)
        for position in range(60):
            step.set(seed, position)
            result = recording()
            if not torch.isfinite(result).all():
                wrong.append(position)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_an_empty_tape_does_nothing() -> None:
    tape = Tape([], [])
    assert len(tape) == 0
    tape.replay()
