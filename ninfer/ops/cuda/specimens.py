"""How continuous integration compiles Triton kernels without a GPU: one typical call of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Specimen:
    """A kernel (`triton.jit`), the types of its arguments by name (`"*bf16"`, `"i32"`, ...), its constants,
    and launch options (`num_warps`, `num_stages`). A constant `EARLY` is left to the architecture (see
    `dependent`). A module of kernels offers `specimens()`, an iterable."""

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int] = field(default_factory=dict)
