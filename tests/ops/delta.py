"""Inputs of the gated delta rule, and its definition in float64."""

from __future__ import annotations

import torch

from ninfer.ops import gated_delta_net


class Problem:
    """Random inputs of B requests of W columns, and states in scattered slots."""

    def __init__(self, requests, columns, k_heads, v_heads, width, v_width, dtype, seed=0) -> None:
        make = torch.Generator().manual_seed(seed)
        count = requests * columns
        self.requests, self.columns = requests, columns
        wide = torch.randn(count, 2 * k_heads * width + v_heads * v_width + 4, generator=make).to(dtype)
        parts = wide[:, 4:].split((k_heads * width, k_heads * width, v_heads * v_width), -1)
        self.q, self.k = (p.view(count, k_heads, width) for p in parts[:2])
        self.v = parts[2].view(count, v_heads, v_width)
        self.g = -torch.rand(count, v_heads, generator=make) * torch.rand(v_heads, generator=make)
        self.beta = torch.rand(count, v_heads, generator=make)
        self.states = torch.randn(2 * requests + 1, v_heads, v_width, width, generator=make)
        slots = torch.randperm(2 * requests + 1, generator=make).int()
        self.sources, self.targets = slots[:requests], slots[requests : 2 * requests]

    def run(self, states, sources, targets, rows=slice(None), records=None) -> torch.Tensor:
        q, k, v, g, beta = (x[rows] for x in (self.q, self.k, self.v, self.g, self.beta))
        return gated_delta_net(q, k, v, g, beta, states, sources, targets, records)

    def reference(self, counts: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(outputs, final states of the requests), column by column; of all columns or of the first few."""

        def unit(x):
            return x / (x.square().sum() + 1e-6).sqrt()

        group = self.v.shape[1] // self.q.shape[1]
        out = torch.zeros(self.v.shape, dtype=torch.float64)
        finals = []
        for b in range(self.requests):
            state = self.states[self.sources[b]].double().clone()
            if self.sources[b] < 0:
                state.zero_()
            for t in range(b * self.columns, b * self.columns + (counts[b] if counts else self.columns)):
                for head in range(self.v.shape[1]):
                    k = unit(self.k[t, head // group].double())
                    q = unit(self.q[t, head // group].double())
                    s = state[head] * self.g[t, head].double().exp()
                    error = self.beta[t, head].double() * (self.v[t, head].double() - s @ k)
                    state[head] = s + torch.outer(error, k)
                    out[t, head] = state[head] @ q / k.numel() ** 0.5
            finals.append(state)
        return out, torch.stack(finals)
