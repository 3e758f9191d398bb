"""The Program in another process: bytes of a record go there, bytes of a record come back."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from ninfer.engine import Core, Marks, Policy, Request
from ninfer.errors import UnavailableError
from ninfer.ops import SamplingParams
from ninfer.runtime import Limits, Plan, plan_model
from ninfer.runtime.records import egress, ingress
from tests.models.loaded import loaded, write

from .harness import GREEDY, Session, drain, settle
from .real import Desk

MODEL = "qwen3.5"
LIMITS = Limits(512, 128, max_concurrency=4, kv_capacity=2048, state_slots=8)


def serve(path: Path, pipe: Connection) -> None:
    """The other process: it knows a model file, limits and records, and nothing of requests."""
    import torch

    from ninfer import models
    from ninfer.artifact import Artifact
    from ninfer.runtime import Program

    torch.set_num_threads(1)
    with Artifact.open(path) as artifact:
        model = models.load(artifact)
    program = Program(model, plan_model(model, LIMITS))
    program.warm_up()
    kind = ingress(program.plan.shape).dtype
    pipe.send_bytes(b"ready")
    while data := pipe.recv_bytes():
        pipe.send_bytes(program.run(np.frombuffer(data, kind)).tobytes())


class Proxy:
    """`Program.run` as the engine sees it."""

    def __init__(self, pipe: Connection, plan: Plan) -> None:
        self.pipe, self.kind = pipe, egress(plan.shape).dtype
        self.units = 0
        self.victim: BaseProcess | None = None
        """A process to be killed instead of the tenth unit from now on."""

    def __call__(self, record: np.ndarray) -> np.ndarray:
        self.units += 1
        if self.victim is not None and self.units == 10:
            self.victim.kill()
        self.pipe.send_bytes(record.tobytes())
        return np.frombuffer(self.pipe.recv_bytes(), self.kind)


@contextmanager
def child(folder: Path) -> Iterator[tuple[BaseProcess, Connection]]:
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(write(MODEL, folder), there), daemon=True)
    process.start()
    there.close()
    try:
        assert here.poll(60), "the other process doesn't start"
        assert here.recv_bytes() == b"ready"
        yield process, here
    finally:
        process.terminate()
        process.join(20)


def requests() -> list[Request]:
    """Two conversations with a common beginning, each asked twice, in several ways of sampling."""
    rng = np.random.default_rng(11)
    common = rng.integers(190, size=100).tolist()
    asked = []
    for index in range(6):
        history = common + rng.integers(190, size=40 + 30 * index).tolist()
        prompt = [*history, 3, 4, 5]
        sampling = (GREEDY, SamplingParams(0.8, frequency_penalty=0.5, seed=index))[index % 2]
        marks = Marks((0, 100), 100, len(history))
        asked += [Request(tuple(prompt), sampling, 10 + 3 * index, None, marks)] * 2
    return asked


def test_answers_are_those_of_this_process(tmp_path: Path) -> None:
    model = loaded(MODEL)
    plan = plan_model(model, LIMITS)
    with Desk(model, context=512, snapshots=8) as desk:
        wanted = [
            desk.ask(r.prompt, r.max_output, marks=r.marks, sampling=r.sampling).ids for r in requests()
        ]
    with child(tmp_path) as (process, pipe):
        run = Proxy(pipe, plan)
        core = Core(run, plan, public_tokens=model.public_tokens, policy=Policy(max_pending=32))
        for _ in range(2):
            handles = [core.submit(request, Session()) for request in requests()]
            assert [drain(handle)[0] for handle in handles] == wanted
        settle(core)
        statistics = core.statistics()
        assert statistics.row_rounds > statistics.rounds
        assert statistics.reused_tokens > 12 * 100
        # It dies in the middle of answers: everybody is told, once, and later ones are refused.
        run.victim, run.units = process, 0
        with core._condition:  # the worker begins when all are there
            handles = [core.submit(request, Session()) for request in requests()]
        for handle in handles:
            with pytest.raises(UnavailableError, match="load the model again"):
                drain(handle)
        assert not core.health().available
        with pytest.raises(UnavailableError):
            core.submit(requests()[0], Session())
        core.stop()
