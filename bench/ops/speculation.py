"""Time of what a speculative round does between its passes, on the GPU, in CUDA graphs.

    python -m bench.ops.speculation [--rows 1,8] [--drafts 3] [--size 131072] [--hidden 5120]

Microseconds per call, one after the other; all is in the L2 cache, as it is in a round, where the kernel
ahead has written it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from bench.ops.operators import Suite
from bench.ops.sampling import microseconds
from ninfer import ops
from ninfer.ops import Role

_VOCABULARY = 248_077
_CALLS = 64


class Case:
    """`rows` requests of 1 + `drafts` columns, all of whose drafts stand; counted only with `penalties`."""

    def __init__(self, rows: int, drafts: int, size: int, hidden: int, penalties: bool) -> None:
        self.device, self.rows, width = torch.device("cuda"), rows, 1 + drafts
        total = rows * width
        self.positions = self._ints(range(total))
        self.tokens = self.drawn = self._ints([7] * total)
        self.produced, self.slots = self._ints([width] * rows), self._ints(range(rows))
        self.count_rows = self._ints(range(total) if penalties else [-1] * total)
        self.counts = torch.zeros(total, _VOCABULARY, dtype=torch.int32, device=self.device)
        self.hidden, self.heads = self._numbers(total, hidden), self._numbers(total, 14_336)
        self.states = self._numbers(rows, hidden)
        self.gains = self._numbers(2, hidden)
        self.scores = torch.randn(rows, size, device=self.device)
        self.token_ids = self._ints(range(size))
        self.table = Suite(self.device).matrix("fp8_e4m3fn_row_bf16", 4096, hidden, Role.TABLE)
        self.limits, self.drafts = self._ints([1 << 20] * rows), self._ints([[0] * drafts] * rows)

    def _ints(self, values: object) -> torch.Tensor:
        values = list(values) if isinstance(values, range) else values
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).bfloat16()

    def count(self) -> object:
        return ops.count_drafts(self.tokens, self.positions, self.count_rows, self.counts, self.rows)

    def accept(self) -> object:
        return ops.accept(
            self.drawn, self.tokens, self.positions, self.produced, self.count_rows, self.counts, self.hidden,
            self.states, self.slots,
        )  # fmt: skip

    def columns(self) -> object:
        q, gate = self.heads[:, :6144], self.heads[:, 7168:13_312]
        return ops.last_columns((self.hidden, q, gate), self.produced)

    def norms(self) -> object:
        tokens, hidden = self.tokens[: self.rows], self.states
        return ops.embedding_pair(tokens, self.table, hidden, self.gains[0], self.gains[1], 1e-6)

    def draft(self) -> object:
        return ops.next_draft(
            self.scores, self.positions[: self.rows], self.limits, self.drafts, 0, self.token_ids
        )

    def all(self) -> list[tuple[str, Callable[[], object]]]:
        return [
            ("count_drafts", self.count),
            ("accept", self.accept),
            ("last_columns", self.columns),
            ("embedding_pair", self.norms),
            ("next_draft", self.draft),
        ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--size", type=int, default=131_072)
    parser.add_argument("--hidden", type=int, default=5120)
    options = parser.parse_args()
    for rows in map(int, options.rows.split(",")):
        for penalties in (False, True):
            case = Case(rows, options.drafts, options.size, options.hidden, penalties)
            cells = [f"{name} {microseconds([call] * _CALLS):.2f}" for name, call in case.all()]
            print(f"B={rows} {'penalties' if penalties else '':9}  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
