"""The recurrent half of the model on the GPU (tiny geometries: in Triton's interpreter) against float64."""

# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from ninfer.errors import OptionError
from ninfer.ops import DeltaRecords, Encoded, Matrix
from ninfer.ops.cuda.convolve import causal_conv, fold_conv
from ninfer.ops.cuda.gating import gating, gdn_gating
from ninfer.ops.cuda.gdn import fold_gdn, gated_delta_net, gdn_mix
from ninfer.ops.cuda.gdn_step import fold_delta_net
from ninfer.ops.fused import GdnMixer
from tests.ops.criteria import CONTROL, ELEMENTWISE, GDN_OUTPUT, GDN_STATE

NAN = float("nan")

TINY = (1, 2, 16, 32)
ODD = (2, 6, 24, 20)
FULL = (16, 48, 128, 128)
"""Key heads, value heads, width of keys, width of values."""


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def dense(rows: int, columns: int, generator: torch.Generator, device: torch.device) -> Matrix:
    """A gating projection as it is placed."""
    matrix = Matrix.of(Encoded("bf16", "", (rows, columns), torch.zeros(1, dtype=torch.uint8)))
    values = torch.randn(rows, columns, generator=generator) / columns**0.5
    matrix.placed(device, values.bfloat16().to(device))
    return matrix


def values(matrix: Matrix) -> torch.Tensor:
    assert isinstance(matrix.plan, torch.Tensor)
    return matrix.plan.double()


@dataclass
class Call:
    """Random inputs of a mixer for B requests of W columns, and states in scattered slots."""

    m: GdnMixer
    qkv: torch.Tensor
    z: torch.Tensor
    h: torch.Tensor
    conv_states: torch.Tensor
    states: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    columns: int

    def run(self, conv_states, states, sources, targets, rows=slice(None), conv=None, records=None):
        return gdn_mix(
            self.m, self.qkv[rows], self.z[rows], self.h[rows], conv_states, states, sources, targets, conv,
            records,
        )  # fmt: skip


def make(geometry, requests, columns, device, hidden=40, taps=4, order=True, seed=0, fresh=False) -> Call:
    k_heads, v_heads, width, v_width = geometry
    g = torch.Generator().manual_seed(seed + 97 * columns)
    count, keys, inner = requests * columns, k_heads * width, v_heads * v_width
    channels, slots = 2 * keys + inner, 2 * requests + 1

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(dtype).to(device)

    heads = random(count, channels + inner, dtype=torch.bfloat16)
    mixer = GdnMixer(
        k_heads, width, v_heads, v_width, 1e-6, dense(v_heads, hidden, g, device),
        dense(v_heads, hidden, g, device), random(v_heads) - 1, random(v_heads),
        random(taps, channels, dtype=torch.bfloat16), random(v_width, dtype=torch.bfloat16),
        torch.randperm(v_heads, generator=g).int().to(device) if order else None,
    )  # fmt: skip
    places = torch.randperm(slots, generator=g).int().to(device)
    sources, targets = places[:requests].clone(), places[requests : 2 * requests].clone()
    if fresh:
        sources[0] = -1
    return Call(
        mixer, heads[:, :channels], heads[:, channels:], random(count, hidden, dtype=torch.bfloat16),
        random(slots, taps - 1, channels, dtype=torch.bfloat16), random(slots, v_heads, v_width, width),
        sources, targets, columns,
    )  # fmt: skip


def rule(q, k, v, g, beta, state):
    """Outputs and final state of one request in float64, `[T, H, D]` with a key head for every value head."""
    outs = []
    for t in range(q.shape[0]):
        state = state * g[t].exp()[:, None, None]
        error = beta[t][:, None] * (v[t] - (state @ k[t][..., None])[..., 0])
        state = state + error[..., None] * k[t][:, None, :]
        outs.append((state @ q[t][..., None])[..., 0] / k.shape[-1] ** 0.5)
    return torch.stack(outs), state


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def convolution(u: torch.Tensor, weight: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """float64 `[T, C]`."""
    long, taps = torch.cat((history, u)).double(), weight.shape[0]
    total = torch.stack([long[j : j + u.shape[0]] * weight[j].double() for j in range(taps)]).sum(0)
    return total * total.sigmoid()


def expected(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, states, histories) of the requests in float64 with the roundings of the parts."""
    m, group = call.m, call.m.value_heads // call.m.key_heads
    keys, ys, finals, histories = m.key_heads * m.key_dim, [], [], []
    for b in range(call.sources.numel()):
        rows = slice(b * call.columns, (b + 1) * call.columns)
        source = int(call.sources[b])
        history, state = call.conv_states[source], call.states[source].double()
        if source < 0:
            history, state = torch.zeros_like(history), torch.zeros_like(state)
        u = convolution(call.qkv[rows], m.convolution, history).bfloat16().double()
        q, k, v = u.split((keys, keys, m.value_heads * m.value_dim), 1)
        q, k = (unit(x.reshape(-1, m.key_heads, m.key_dim)).repeat_interleave(group, 1) for x in (q, k))
        h = call.h[rows].double()
        s = h @ values(m.a).T + m.dt_bias.double()
        g = -m.a_log.double().exp() * torch.logaddexp(s, torch.zeros_like(s))
        beta = (h @ values(m.b).T).sigmoid()
        o, state = rule(q, k, v.reshape(-1, m.value_heads, m.value_dim), g, beta, state)
        o = o.bfloat16().double()
        z = call.z[rows].double().reshape(o.shape)
        y = o / (o.square().mean(-1, keepdim=True) + m.eps).sqrt() * m.norm.double() * z * z.sigmoid()
        if m.head_order is not None:
            y = y[:, m.head_order.long()]
        ys.append(y.flatten(1))
        finals.append(state)
        histories.append(torch.cat((history, call.qkv[rows]))[call.columns :])
    return torch.cat(ys), torch.stack(finals), torch.stack(histories)


def check_mix(call: Call) -> None:
    histories, states = call.conv_states.clone(), call.states.clone()
    y = call.run(histories, states, call.sources, call.targets)
    wanted, finals, kept = expected(call)
    GDN_OUTPUT.check(y, wanted)
    GDN_STATE.check(states[call.targets.long()], finals)
    assert torch.equal(bits(histories[call.targets.long()]), bits(kept))
    others = [s for s in range(len(states)) if s not in call.targets.tolist()]
    assert torch.equal(states[others], call.states[others])
    assert torch.equal(bits(histories[others]), bits(call.conv_states[others]))
    # In place.
    sources = torch.where(call.sources < 0, call.targets, call.sources)
    first = int(call.sources[0]) >= 0
    if first:
        histories, states2 = call.conv_states.clone(), call.states.clone()
        again = call.run(histories, states2, sources, sources)
        assert torch.equal(y, again)
        assert torch.equal(bits(histories[sources.long()]), bits(kept))
        assert torch.equal(states2[sources.long()], states[call.targets.long()])
    # Each request alone.
    for b in range(call.sources.numel()):
        rows, one = slice(b * call.columns, (b + 1) * call.columns), slice(b, b + 1)
        histories, states3 = call.conv_states.clone(), call.states.clone()
        alone = call.run(histories, states3, call.sources[one], call.targets[one], rows)
        assert torch.equal(alone, y[rows])
        assert torch.equal(states3[call.targets[b].long()], states[call.targets[b].long()])


def room(call: Call, spare: int) -> tuple[torch.Tensor, DeltaRecords]:
    m, device = call.m, call.h.device
    rows = call.sources.numel() * (call.columns + spare)

    def full(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows, *shape), NAN, dtype=dtype, device=device)

    half = torch.bfloat16
    return full(call.qkv.shape[1], dtype=half), DeltaRecords(
        full(m.key_heads, m.key_dim, dtype=half), full(m.value_heads, m.value_dim, dtype=half),
        full(m.value_heads), full(m.value_heads),
    )  # fmt: skip


def check_records(call: Call) -> None:
    """Recorded columns show what a direct call shows, and their fold leaves its bits, for several counts."""
    conv, records = room(call, 1)
    requests, columns = call.sources.numel(), call.columns
    direct, histories = call.states.clone(), call.conv_states.clone()
    y = call.run(histories, direct, call.sources, call.targets)
    states, kept = call.states.clone(), call.conv_states.clone()
    nowhere = torch.full_like(call.targets, 1 << 20)
    assert torch.equal(call.run(kept, states, call.sources, nowhere, slice(None), conv, records), y)
    assert torch.equal(states, call.states)
    assert torch.equal(bits(kept), bits(call.conv_states))
    for shift in range(0, columns + 1, max(1, columns // 3)):
        counts = torch.tensor([(columns - shift + 5 * b) % (columns + 1) for b in range(requests)]).int()
        states, kept = call.states.clone(), call.conv_states.clone()
        folded = [x.clone() for x in (conv, records.k, records.v, records.g, records.beta)]
        for b, count in enumerate(counts.tolist()):
            for x in folded:
                x[b * (columns + 1) + count : (b + 1) * (columns + 1)] = NAN
        device_counts = counts.to(call.h.device)
        fold_conv(folded[0], device_counts, kept, call.sources, call.targets)
        fold_delta_net(DeltaRecords(*folded[1:]), device_counts, states, call.sources, call.targets)
        wanted, wanted_histories = call.states.clone(), call.conv_states.clone()
        for b, count in enumerate(counts.tolist()):
            if count:
                rows, one = slice(b * columns, b * columns + count), slice(b, b + 1)
                call.run(wanted_histories, wanted, call.sources[one], call.targets[one], rows)
        assert torch.equal(bits(states), bits(wanted)), counts
        assert torch.equal(bits(kept), bits(wanted_histories)), counts
        # Two layers at once, the second with other histories and states.
        states, kept = call.states.clone(), call.conv_states.clone()
        others, other_histories = call.states.flip(0).contiguous(), call.conv_states.flip(0).contiguous()
        layer = DeltaRecords(*folded[1:])
        expected_states, expected_histories = others.clone(), other_histories.clone()
        slots = device_counts, call.sources, call.targets
        fold_conv(folded[0], device_counts, expected_histories, call.sources, call.targets)
        fold_delta_net(layer, device_counts, expected_states, call.sources, call.targets)
        fold_gdn(
            [folded[0]] * 2, [layer] * 2, slots[0], [kept, other_histories], [states, others], *slots[1:]
        )
        assert torch.equal(bits(states), bits(wanted)), counts
        assert torch.equal(bits(kept), bits(wanted_histories)), counts
        assert torch.equal(bits(others), bits(expected_states)), counts
        assert torch.equal(bits(other_histories), bits(expected_histories)), counts


@pytest.mark.parametrize(("geometry", "columns"), [(TINY, 1), (TINY, 3), (TINY, 5), (ODD, 2)])
def test_mix(geometry, columns: int, device: torch.device) -> None:
    check_mix(make(geometry, 2, columns, device, fresh=columns == 3))


@pytest.mark.parametrize(("taps", "order"), [(2, False), (5, True)])
def test_mix_of_other_filters(taps: int, order: bool, device: torch.device) -> None:
    check_mix(make(TINY, 1, 2, device, taps=taps, order=order))


@pytest.mark.parametrize("columns", [1, 3])
def test_records(columns: int, device: torch.device) -> None:
    check_records(make(TINY, 2, columns, device, fresh=True))


@pytest.mark.parametrize("columns", [17, 64])
def test_wide_mix(columns: int, device: torch.device) -> None:
    check_mix(make(TINY, 1, columns, device))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 2, 5, 16])
@pytest.mark.parametrize("requests", [1, 3, 8])
@pytest.mark.parametrize("geometry", [FULL, (2, 4, 128, 128), (3, 3, 64, 64), (1, 2, 40, 128)])
def test_mix_on_the_gpu(geometry, requests: int, columns: int, device: torch.device) -> None:
    call = make(geometry, requests, columns, device, hidden=5120, fresh=columns == 2)
    check_mix(call)
    check_records(call)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [17, 63, 64, 65, 128, 150])
@pytest.mark.parametrize("geometry", [FULL, (2, 4, 128, 128), (3, 3, 64, 64), (2, 6, 24, 20)])
def test_wide_mix_on_the_gpu(geometry, columns: int, device: torch.device) -> None:
    check_mix(make(geometry, 2, columns, device, hidden=5120, fresh=columns == 64))


@pytest.mark.gpu
def test_many_calls_are_one(device: torch.device) -> None:
    """A long sequence in several calls of all routes, in place, against float64."""
    call = make(FULL, 1, 1250, device, hidden=256)
    call.m.a_log.fill_(-4)  # a long memory
    wanted, finals, kept = expected(call)
    begin, pieces = 0, []
    for count in (1, 64, 5, 1024, 16, 127, 13):
        rows = slice(begin, begin + count)
        pieces.append(call.run(call.conv_states, call.states, call.sources, call.sources, rows))
        begin += count
    GDN_OUTPUT.check(torch.cat(pieces), wanted)
    GDN_STATE.check(call.states[call.sources.long()], finals)
    assert torch.equal(bits(call.conv_states[call.sources.long()]), bits(kept))


def delta_problem(geometry, requests, columns, device, seed=0):
    """q, k, v, g, beta, states, sources, targets."""
    k_heads, v_heads, width, v_width = geometry
    g = torch.Generator().manual_seed(seed + columns)
    count, slots = requests * columns, 2 * requests + 1
    wide = torch.randn(count, 2 * k_heads * width + v_heads * v_width + 8, generator=g).bfloat16().to(device)
    parts = wide[:, 8:].split((k_heads * width, k_heads * width, v_heads * v_width), 1)
    q, k = (x.view(count, k_heads, width) for x in parts[:2])
    v = parts[2].view(count, v_heads, v_width)
    decay = -torch.rand(count, v_heads, generator=g) * torch.rand(v_heads, generator=g)
    beta = torch.rand(count, v_heads, generator=g)
    states = torch.randn(slots, v_heads, v_width, width, generator=g)
    places = torch.randperm(slots, generator=g).int().to(device)
    return (
        q, k, v, decay.to(device), beta.to(device), states.to(device), places[:requests].clone(),
        places[requests : 2 * requests].clone(),
    )  # fmt: skip


def check_delta(problem) -> None:
    q, k, v, g, beta, states, sources, targets = problem
    before = states.clone()
    out = gated_delta_net(*problem, None)
    columns, group = v.shape[0] // sources.numel(), v.shape[1] // k.shape[1]
    for b in range(sources.numel()):
        rows = slice(b * columns, (b + 1) * columns)
        state = before[sources[b].long()].double() * (int(sources[b]) >= 0)
        wide = [unit(x[rows].double()).repeat_interleave(group, 1) for x in (q, k)]
        wanted, state = rule(*wide, v[rows].double(), g[rows].double(), beta[rows].double(), state)
        GDN_OUTPUT.check(out[rows], wanted)
        GDN_STATE.check(states[targets[b].long()], state)


@pytest.mark.parametrize("columns", [1, 64, 67])
def test_delta_rule(columns: int, device: torch.device) -> None:
    check_delta(delta_problem(TINY, 1, columns, device))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 15, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("geometry", [FULL, (2, 4, 128, 128), (3, 3, 64, 64), (2, 6, 24, 20)])
def test_delta_rule_on_the_gpu(geometry, columns: int, device: torch.device) -> None:
    for seed in range(3):
        check_delta(delta_problem(geometry, 2, columns, device, seed))


@pytest.mark.parametrize("geometry", [TINY, pytest.param((1, 2, 128, 128), marks=pytest.mark.gpu)])
def test_strong_decay_and_repeated_keys(geometry, device: torch.device) -> None:
    """What upsets a chunked form: decays that underflow inside a chunk, and one key over and over."""
    problem = delta_problem(geometry, 1, 130, device)
    problem[3][:, 0] = -8.0
    problem[3][:, 1] = 0.0
    problem[1][:] = problem[1][:1].clone()
    problem[4][:] = 1.0
    check_delta(problem)


@pytest.mark.parametrize("columns", [1, 3, 40])
@pytest.mark.parametrize(("channels", "taps"), [(72, 4), (13, 4), (32, 2), (16, 1)])
def test_convolution(columns: int, channels: int, taps: int, device: torch.device) -> None:
    u = torch.randn(2 * columns, channels + 9).bfloat16().to(device)[:, 5 : 5 + channels]
    weight = torch.randn(taps, channels).bfloat16().to(device)
    before = torch.randn(5, taps - 1, channels).bfloat16().to(device)
    states = before.clone()
    sources, targets = torch.tensor([3, -1]).int().to(device), torch.tensor([3, 0]).int().to(device)
    out = causal_conv(u, weight, states, sources, targets, None)
    for b in range(2):
        rows = u[b * columns : (b + 1) * columns]
        history = before[sources[b].long()] * (b == 0)
        ELEMENTWISE.check(out[b * columns : (b + 1) * columns], convolution(rows, weight, history))
        assert torch.equal(states[targets[b].long()], torch.cat((history, rows))[columns:])
    assert torch.equal(states[[1, 2, 4]], before[[1, 2, 4]])


def check_gating(columns: int, heads: int, hidden: int, few: bool | None, device: torch.device) -> None:
    g = torch.Generator().manual_seed(columns)
    a, b = dense(heads, hidden, g, device), dense(heads, hidden, g, device)
    x = (2 * torch.randn(columns, hidden, generator=g)).bfloat16().to(device)
    a_log, bias = torch.randn(heads, generator=g).to(device), torch.randn(heads, generator=g).to(device)
    if few is None:
        decay, strength = gdn_gating(x, a, b, a_log, bias)
    else:
        decay, strength = gating(x, a, b, a_log, bias, few)
    s = x.double() @ values(a).T + bias.double()
    CONTROL.check(decay, -a_log.double().exp() * torch.logaddexp(s, torch.zeros_like(s)))
    CONTROL.check(strength, (x.double() @ values(b).T).sigmoid())


@pytest.mark.parametrize("few", [True, False])
def test_gating_is_not_rounded(few: bool, device: torch.device) -> None:
    check_gating(6, 5, 72, few, device)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1, 4, 17, 128, 129, 700])
def test_gating_on_the_gpu(columns: int, device: torch.device) -> None:
    check_gating(columns, 48, 5120, None, device)


def test_any_bits_of_a_column_are_kept(device: torch.device) -> None:
    """Histories and records are copies, not numbers."""
    words = torch.tensor([[0x7F81, -0x7F, -0x8000, 0, 1] * 4], dtype=torch.int16, device=device)
    u = words.view(torch.bfloat16)
    records, states = (torch.zeros(shape).bfloat16().to(device) for shape in ((1, 20), (2, 3, 20)))
    source, target = torch.tensor([-1]).int().to(device), torch.tensor([1]).int().to(device)
    weight = torch.ones(4, 20).bfloat16().to(device)
    causal_conv(u, weight, states, source, target, records)
    assert torch.equal(records.view(torch.int16), words)
    fold_conv(records, torch.tensor([1]).int().to(device), states, source, target)
    assert torch.equal(states[1, 2].view(torch.int16), words[0])


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    call = make(TINY, 2, 2, device)
    conv, records = room(call, 0)
    slots = call.sources, call.targets
    with pytest.raises(OptionError, match="both"):
        call.run(call.conv_states, call.states, *slots, slice(None), None, records)
    with pytest.raises(OptionError, match="must be float32"):
        call.run(call.conv_states, call.states[:, :1], *slots)
    with pytest.raises(OptionError, match="int32"):
        call.run(call.conv_states, call.states, call.sources.long(), call.targets)
    with pytest.raises(OptionError, match="bfloat16"):
        causal_conv(conv.float(), call.m.convolution, call.conv_states.float(), *slots, None)
    with pytest.raises(OptionError, match="1 counts"):
        fold_delta_net(records, call.targets[:1], call.states, *slots)
