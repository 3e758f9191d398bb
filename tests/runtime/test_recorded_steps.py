"""Decode steps are recorded once and replayed, bit for bit what the operators give one by one."""

from functools import partial
from pathlib import Path

import pytest
import torch

from ninfer import models
from ninfer.artifact import Artifact
from ninfer.models import Model
from ninfer.runtime import Program, SamplingParams
from tests.models.draft import draft
from tests.models.tiny import FULL, LINEAR, Geometry, LlamaGeometry, Qwen35Geometry, build

GEOMETRIES: dict[str, Geometry] = {
    "qwen3.5": Qwen35Geometry(layer_types=(LINEAR, FULL, LINEAR), value_heads=4),
    "llama": LlamaGeometry(layers=2),
}


def answer(model: Model, *, recorded: bool) -> tuple[list[int], Program]:
    """Tokens across a page boundary, with a forced span, a second turn and a new sequence."""
    program = Program(model, max_context=256)
    executor = program._executor
    if not recorded:
        for (source, target), _ in executor._steps.items():
            step = partial(executor._step, executor._batch(1, source, target))
            executor._steps[source, target] = step  # type: ignore[assignment]
    output: list[int] = []

    def decode(count: int) -> None:
        for _ in range(count):
            output.extend(program.decode().tokens)
            program.commit(1)

    prompt = [(11 * i + 5) % 199 for i in range(50)]
    for _ in range(2):
        program.start(prompt, SamplingParams(temperature=0.7, seed=3))
        output.extend(program.prefill().tokens)
        program.commit(1)
        decode(20)
        program.force([7, 8, 9])
        decode(5)
        prompt = prompt + output + [1, 2]
    program.start([4, 5], SamplingParams(temperature=0.0, presence_penalty=1.0))
    output.extend(program.prefill().tokens)
    program.commit(1)
    decode(10)
    return output, program


@pytest.mark.parametrize("name", GEOMETRIES)
def test_replayed_steps_are_bit_for_bit_those_of_the_operators(name: str, tmp_path: Path) -> None:
    path = draft(GEOMETRIES[name], build(GEOMETRIES[name])).write(tmp_path / "tiny.ninfer")
    with Artifact.open(path) as artifact:
        model = models.load(artifact)
    plain, without = answer(model, recorded=False)
    replayed, program = answer(model, recorded=True)
    steps = program._executor._steps.values()
    assert [step.obstacle for step in steps] == [None, None]
    assert all(step.recorded for step in steps)
    assert replayed == plain
    ours, theirs = program._executor._cache, without._executor._cache
    for mine, other in zip(
        (*(x for p in ours.kv for x in (p.k, p.v)), *ours.conv, *ours.recurrent),
        (*(x for p in theirs.kv for x in (p.k, p.v)), *theirs.conv, *theirs.recurrent),
        strict=True,
    ):
        assert torch.equal(mine, other)
