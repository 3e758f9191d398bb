"""The gated delta rule, its control values and its convolution against float64."""

from __future__ import annotations

import pytest
import torch

from ninfer.errors import OptionError
from ninfer.ops import causal_conv, gated_delta_net, gdn_gating
from tests.ops.criteria import CONTROL, ELEMENTWISE, GDN_OUTPUT, GDN_STATE, criterion
from tests.ops.delta import Problem
from tests.ops.weights import random_matrix

ODD = [((2, 4, 16, 32), n) for n in (1, 2, 7, 63, 64, 65, 128, 150)]
ODD += [((1, 3, 24, 20), n) for n in (1, 5, 64, 65, 130)]
FULL = [((2, 2, 128, 128), n) for n in (1, 65)]


@pytest.mark.parametrize(("geometry", "columns"), ODD + FULL)
def test_outputs_and_states(geometry: tuple[int, ...], columns: int, dtype: torch.dtype) -> None:
    """Geometry: key heads, value heads, width of keys, width of values."""
    k_heads, v_heads, width, v_width = geometry
    problem = Problem(2, columns, k_heads, v_heads, width, v_width, dtype)
    states = problem.states.clone()
    out = problem.run(states, problem.sources, problem.targets)
    reference, finals = problem.reference()
    criterion(GDN_OUTPUT, dtype).check(out, reference)
    GDN_STATE.check(states[problem.targets.long()], finals)
    untouched = [s for s in range(len(states)) if s not in problem.targets.tolist()]
    assert torch.equal(states[untouched], problem.states[untouched])


@pytest.mark.parametrize("columns", [1, 5, 17, 64, 70])
@pytest.mark.parametrize("width", [16, 24])
def test_source_minus_one_is_the_zero_state(columns: int, width: int, dtype: torch.dtype) -> None:
    problem = Problem(2, columns, 2, 4, width, 20, dtype)
    states, zeroed = problem.states.clone(), problem.states.clone()
    zeroed[problem.sources[0]] = 0
    expected = problem.run(zeroed, problem.sources, problem.targets)
    problem.sources[0] = -1
    states[-1] = torch.nan  # what the number would mean in Python
    out = problem.run(states, problem.sources, problem.targets)
    assert torch.equal(out, expected)
    assert torch.equal(states[problem.targets.long()], zeroed[problem.targets.long()])
    reference, finals = problem.reference()
    criterion(GDN_OUTPUT, dtype).check(out, reference)
    GDN_STATE.check(states[problem.targets.long()], finals)


@pytest.mark.parametrize("columns", [3, 64, 70])
def test_a_state_may_be_advanced_in_place(columns: int) -> None:
    problem = Problem(2, columns, 2, 4, 16, 16, torch.float32)
    apart, together = problem.states.clone(), problem.states.clone()
    a = problem.run(apart, problem.sources, problem.targets)
    b = problem.run(together, problem.sources, problem.sources)
    assert torch.equal(a, b)
    assert torch.equal(apart[problem.targets.long()], together[problem.sources.long()])


@pytest.mark.parametrize("cuts", [(64,), (1,), (63,), (65, 130), (100, 164)])
@pytest.mark.parametrize("seed", range(3))
def test_split_calls_continue_the_state(cuts: tuple[int, ...], seed: int) -> None:
    problem = Problem(1, 200, 2, 4, 16, 24, torch.float32, seed)
    whole, parts = problem.states.clone(), problem.states.clone()
    expected = problem.run(whole, problem.sources, problem.targets)
    source, pieces = problem.sources, []
    for begin, end in zip((0, *cuts), (*cuts, 200), strict=True):
        pieces.append(problem.run(parts, source, problem.targets, slice(begin, end)))
        source = problem.targets
    GDN_OUTPUT.check(torch.cat(pieces), expected)
    GDN_STATE.check(parts[problem.targets.long()], whole[problem.targets.long()])


def test_strong_decay_and_repeated_keys() -> None:
    """What upsets a chunked form: decays that underflow inside a chunk, and one key over and over."""
    problem = Problem(1, 130, 1, 2, 16, 16, torch.float32)
    problem.g[:, 0] = -8.0
    problem.g[:, 1] = 0.0
    problem.k[:] = problem.k[:1]
    problem.beta[:] = 1.0
    states = problem.states.clone()
    out = problem.run(states, problem.sources, problem.targets)
    reference, finals = problem.reference()
    GDN_OUTPUT.check(out, reference)
    GDN_STATE.check(states[problem.targets.long()], finals)


@pytest.mark.parametrize("format", ["bf16", "fp32", "q8_g32_fp16"])
@pytest.mark.parametrize("columns", [1, 3, 40])
def test_gating_is_not_rounded(format: str, columns: int, dtype: torch.dtype) -> None:
    a, a_values = random_matrix(format, 6, 96, 1)
    b, b_values = random_matrix(format, 6, 96, 2)
    x = torch.randn(columns, 96).to(dtype)
    a_log, bias = torch.randn(6), torch.randn(6)
    g, beta = gdn_gating(x, a, b, a_log, bias)
    s = x.double() @ a_values.double().T + bias.double()
    softplus = torch.logaddexp(s, torch.zeros_like(s))
    CONTROL.check(g, -a_log.double().exp() * softplus)
    CONTROL.check(beta, (x.double() @ b_values.double().T).sigmoid())


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 50])
@pytest.mark.parametrize(("channels", "taps"), [(72, 4), (13, 4), (32, 2), (16, 1)])
@pytest.mark.parametrize("first", [1, -1])
def test_convolution(first: int, columns: int, channels: int, taps: int, dtype: torch.dtype) -> None:
    """`first`: where a request comes from; -1 is a history of zeros."""
    u = torch.randn(2 * columns, channels + 9).to(dtype)[:, 5 : 5 + channels]
    weight = torch.randn(taps, channels).bfloat16()
    states = torch.randn(5, taps - 1, channels).to(dtype)
    before = states.clone()
    sources, targets = torch.tensor([3, first], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    out = causal_conv(u, weight, states, sources, targets)
    for b in range(2):
        rows = u[b * columns : (b + 1) * columns]
        history = torch.cat((before[sources[b]] * (sources[b] >= 0), rows))
        reference = torch.stack(
            [(history[t : t + taps].double() * weight.double()).sum(0) for t in range(columns)]
        )
        reference = reference * reference.sigmoid()
        criterion(ELEMENTWISE, dtype).check(out[b * columns : (b + 1) * columns], reference)
        assert torch.equal(states[targets[b]], history[columns:])
    assert torch.equal(states[[1, 2, 4]], before[[1, 2, 4]])


def test_shapes_that_do_not_fit_are_refused() -> None:
    problem = Problem(2, 3, 2, 4, 16, 16, torch.float32)
    slots = (problem.sources, problem.targets)
    with pytest.raises(OptionError, match="do not match"):
        gated_delta_net(problem.q[:5], problem.k, problem.v, problem.g, problem.beta, problem.states, *slots)
    with pytest.raises(OptionError, match="states must be float32"):
        gated_delta_net(
            problem.q, problem.k, problem.v, problem.g, problem.beta, problem.states[:, :3], *slots
        )
    with pytest.raises(OptionError, match="g and beta must be float32"):
        gated_delta_net(problem.q, problem.k, problem.v, problem.g[:2], problem.beta, problem.states, *slots)
    with pytest.raises(OptionError, match="convolution"):
        causal_conv(problem.q.flatten(1), torch.zeros(4, 31), torch.zeros(9, 3, 32), *slots)
    a, _ = random_matrix("bf16", 6, 16)
    with pytest.raises(OptionError, match="gating of 6 heads"):
        gdn_gating(torch.zeros(1, 16), a, a, torch.zeros(5), torch.zeros(6))
