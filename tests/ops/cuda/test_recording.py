"""Captured work does the same as the work itself, in memory that recordings share."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from ninfer.errors import EngineError, OptionError
from ninfer.ops import Draws, SamplingParams
from ninfer.ops.cuda.choose import clear_counts, count_tokens, draw
from ninfer.ops.cuda.likely import token_logprobs
from ninfer.ops.cuda.recording import Pool, record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def poisoned() -> None:
    """Not here: fresh memory of a capture is that of the capture before."""


class Step:
    """Scores are drawn from, counted and reported; several arrays are made and forgotten on the way."""

    def __init__(self, device: torch.device, rows: int, size: int = 5000) -> None:
        torch.manual_seed(rows)
        self.base = torch.randn(rows, size, device=device)
        self.shift = torch.zeros(rows, 1, device=device)
        params = [SamplingParams(seed=row, frequency_penalty=0.5) for row in range(rows)]
        self.draws = Draws.of(params, range(rows), [1] * rows, range(rows), device)
        self.counts = torch.zeros(rows, size, dtype=torch.int32, device=device)
        self.cleared = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.wanted = torch.full((rows,), 5, dtype=torch.int32, device=device)
        self.logprob = torch.zeros(rows, device=device)
        self.top_ids = torch.zeros(rows, 20, dtype=torch.int32, device=device)
        self.top_logprobs = torch.zeros(rows, 20, device=device)

    def set(self, call: int) -> None:
        self.shift.fill_(call)
        self.draws.position.fill_(call)
        self.cleared[0] = 0 if call % 4 == 3 else -1

    def __call__(self) -> torch.Tensor:
        clear_counts(self.cleared, self.counts)
        scores = (self.base * torch.cos(self.shift + self.base)).contiguous()
        tokens = draw(scores, self.draws, self.counts)
        count_tokens(tokens, self.draws.count_rows, self.counts)
        token_logprobs(scores, tokens, self.wanted, self.logprob, self.top_ids, self.top_logprobs)
        return tokens


def test_replays_equal_the_work(device: torch.device) -> None:
    pool = Pool(device)
    for rows in (1, 3, 8):
        plain, recorded = Step(device, rows), Step(device, rows)
        plain.set(0)
        recorded.set(0)
        with torch.inference_mode():
            assert torch.equal(plain(), recorded())
            plain.set(1)
            recorded.set(1)
            result, tape, obstacle = record(recorded, pool)
            assert obstacle is None
            assert torch.equal(plain(), result)
            address = result.data_ptr()
            for call in range(2, 20):
                plain.set(call)
                recorded.set(call)
                tape.replay()
                assert torch.equal(plain(), result), call
                for name in ("counts", "logprob", "top_ids", "top_logprobs"):
                    assert torch.equal(getattr(plain, name), getattr(recorded, name)), (call, name)
            assert result.data_ptr() == address
        assert plain.counts.sum() > 0


def test_recordings_share_memory_but_no_results(device: torch.device) -> None:
    x = torch.randn(1 << 20, device=device)

    def work() -> torch.Tensor:
        big = torch.sin(x)
        return (torch.cos(big) + big)[:1000].clone()

    expected, pool = work(), Pool(device)
    torch.cuda.synchronize()
    results, tapes, taken = [], [], []
    for _ in range(6):
        result, tape, _ = record(work, pool)
        results.append(result)
        tapes.append(tape)
        taken.append(torch.cuda.memory_reserved(device))
    assert taken[-1] - taken[0] <= 4 << 20  # not 5 times the 12 MiB that one takes
    assert len({result.data_ptr() for result in results}) == 6
    for tape, result in zip(tapes, results, strict=True):
        result.zero_()
        tape.replay()
        assert torch.equal(result, expected)


def test_nothing_runs_while_work_is_captured(device: torch.device) -> None:
    total = torch.zeros(1, device=device)

    def work() -> torch.Tensor:
        total.add_(1)
        return total

    work()
    result, tape, _ = record(work)
    assert int(result) == 2
    tape.replay()
    assert int(result) == 3


def test_work_that_waits_for_the_gpu_is_refused_and_leaves_all_usable(device: torch.device) -> None:
    x, pool = torch.ones(4, device=device), Pool(device)

    def waits() -> float:
        return (x * 2).sum().item()

    def refuses() -> None:
        raise OptionError("no")

    assert waits() == 8.0
    with pytest.raises(EngineError, match="_local_scalar_dense cannot be captured"):
        record(waits, pool)
    with pytest.raises(OptionError, match="no"):
        record(refuses, pool)
    assert waits() == 8.0
    result, tape, _ = record(lambda: x * 3, pool)
    x.fill_(5)
    tape.replay()
    assert result.tolist() == [15.0] * 4
    assert gc.isenabled()


def test_other_threads_may_use_the_gpu_meanwhile(device: torch.device) -> None:
    x, pool, done = torch.ones(1000, device=device), Pool(device), threading.Event()
    sums: list[float] = []

    def other() -> None:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            while not done.is_set():
                sums.append(torch.ones(1 << 16).to(device).sum().item())

    worker = threading.Thread(target=other)
    worker.start()
    tapes = [record(lambda: x * 2, pool) for _ in range(20)]
    done.set()
    worker.join()
    assert sums
    assert set(sums) == {65536.0}
    for result, tape, _ in tapes:
        tape.replay()
        assert torch.equal(result, x * 2)
