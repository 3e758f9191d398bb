"""What the toy must answer, worked out token by token without an engine."""

from collections.abc import Sequence

from ninfer.ops import SamplingParams
from tests.engine.harness import GREEDY, Rule
from tests.runtime.toy import PUBLIC, expected_token

TOP = 5.0
"""The toy's score of the token that it predicts; every other one has 0."""


def greedy_answer(
    prompt: Sequence[int],
    count: int,
    *,
    recurrent: bool = True,
    sampling: SamplingParams = GREEDY,
    think: int | None = None,
    closer: Sequence[int] = (),
    stop: int | None = None,
    rule: Rule | None = None,
) -> list[int]:
    """`count` tokens at most, only such as `rule` allows; after `think` of them `closer` follows; ends with
    `stop`."""
    output: list[int] = []
    while len(output) < count:
        scores = [0.0] * PUBLIC
        scores[expected_token([*prompt, *output], recurrent)] = TOP
        for token in set(output):
            times = output.count(token)
            scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * times
        allowed = rule([*prompt, *output]) if rule is not None else None
        candidates = range(PUBLIC) if allowed is None else allowed
        output.append(max(candidates, key=lambda token: (scores[token], -token)))
        if output[-1] == stop:
            break
        if len(output) == think and len(output) < count:
            output += closer
    return output
