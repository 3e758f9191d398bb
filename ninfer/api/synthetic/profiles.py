"""Which matrix has which format: the converter's own recipes, run on a checkpoint that only says how it would
store each matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ninfer import formats
from ninfer.artifact import encoded_bytes
from ninfer.artifact.sizes import default_layout
from ninfer.convert import proposal, recipes
from ninfer.convert.catalog import Catalog
from ninfer.convert.parameters import Geometry, Parameter, declare
from ninfer.convert.plan import Plan, Planner
from ninfer.convert.recipe import BASE, Recipe, check
from ninfer.convert.source import Blocks
from ninfer.convert.views import Computed, Rows, View, untiled
from ninfer.errors import FormatError

INPUT_DIVISOR = 256.0
"""A4 quantizes activations of about unit size: 256 keeps scales of groups of up to 10 and down to 0.001."""

Stored = Callable[[Parameter, Geometry], str]
_Q4_K, _Q6_K = 144, 210


@dataclass(frozen=True)
class Profile:
    """`recipe` of the converter, and how the checkpoint stores a matrix: `base`, and `quantized` where the
    recipe asks for a second one. `is_gguf`: value heads are tiled, as GGUF exporters leave them."""

    recipe: str
    base: Stored = lambda parameter, geometry: "bf16"
    quantized: Stored | None = None
    is_gguf: bool = False


def _layers(format: str) -> Stored:
    """One format for all projections of the layers; endpoints and gating in BF16."""

    def stored(parameter: Parameter, geometry: Geometry) -> str:
        del geometry
        return format if _is_projection(parameter) else "bf16"

    return stored


def _official(parameter: Parameter, geometry: Geometry) -> str:
    """FP8 rows for mixers and head, NVFP4 MLPs, FP8 again in the last eighth of the layers."""
    name = parameter.name
    if not _is_projection(parameter):
        return recipes.FP8 if name == recipes.HEAD else "bf16"
    layers = len(geometry.layers)
    wide = "/mlp/" in name and int(name.split("/")[2]) < layers - layers // 8
    return recipes.NVFP4 if wide else recipes.FP8


def _ggml(format: str) -> Stored:
    """One GGML format for everything, endpoints and gating too; 8 bits where rows are no whole blocks."""

    def stored(parameter: Parameter, geometry: Geometry) -> str:
        del geometry
        return format if parameter.shape[1] % formats.get(format).group == 0 else "ggml_q8_0"

    return stored


def _is_projection(parameter: Parameter) -> bool:
    return "/layers/" in parameter.name and not parameter.name.endswith(("a_projection", "b_projection"))


PROFILES: dict[str, Profile] = {
    "quasar": Profile("quasar", quantized=_layers(recipes.NVFP4)),
    "official": Profile("nvfp4-official", quantized=_official),
    "groupwise": Profile("groupwise-int"),
    "groupwise8": Profile("groupwise-int8"),
    "fp8": Profile("fp8-block", _layers(recipes.FP8_BLOCK)),
    "q4_k_m": Profile("gguf-preserved", _ggml("ggml_k"), is_gguf=True),
    "q4_1": Profile("gguf-preserved", _ggml("ggml_q4_1"), is_gguf=True),
    "q8_0": Profile("gguf-preserved", _ggml("ggml_q8_0"), is_gguf=True),
    "bf16": Profile("bf16"),
}


def plan(configs: Mapping[str, Mapping[str, Any]], profile: Profile, proposal_rows: int = 0) -> Plan:
    """Objects, bindings and uses of a model's components, as a conversion by the profile's recipe makes
    them; with a proposal head if it has rows."""
    config = configs["text"]
    parameters = declare(configs)
    if proposal_rows:
        declared = proposal.declare(proposal_rows, config["hidden_size"], configs)
        parameters |= {parameter.name: parameter for parameter in declared}
    catalog = _Catalog(parameters, Geometry.of(config), profile)
    run = Recipe(configs, catalog)
    if config["tie_word_embeddings"]:
        run.share(recipes.HEAD, recipes.EMBEDDING)
    recipes.load(profile.recipe)(run)
    if proposal_rows:
        proposal.configure(run)
    check(parameters, run.choices)
    return Planner(catalog, run.choices).plan()


@dataclass(frozen=True, eq=False)
class _Matrix:
    """What the converter asks of a source's matrix before it reads from it."""

    shape: tuple[int, int]
    stored: str
    block_bytes: int = 0

    @property
    def encoded_unit(self) -> int:
        return formats.get(self.stored).group

    @property
    def weight_divisor(self) -> float | None:
        return 1.0 if self.stored == recipes.NVFP4 else None

    @property
    def input_divisor(self) -> float | None:
        return INPUT_DIVISOR if self.stored == recipes.NVFP4 else None

    def values(self, rows: np.ndarray, columns: Blocks | None = None) -> torch.Tensor:
        raise NotImplementedError("a synthetic checkpoint has no values")

    encoded = values  # pyright: ignore[reportAssignmentType]


class _Catalog(Catalog):
    """All parameters in checkpoints without bytes."""

    def __init__(self, parameters: Mapping[str, Parameter], geometry: Geometry, profile: Profile) -> None:
        sources: dict[str, Any] = {BASE: None}
        if profile.quantized is not None:
            sources[recipes.QUANTIZED] = None
        super().__init__(parameters, sources, {})
        self._geometry, self._profile = geometry, profile

    def view(self, name: str, source: str) -> View:
        parameter = self.parameters[name]
        if parameter.is_direct:
            return Computed(name, torch.empty(parameter.shape, device="meta"))
        rows, columns = parameter.shape
        return Rows(name, (rows, columns), columns=self._order(parameter))

    def holds(self, name: str, source: str) -> bool:
        return True

    def matrix(self, name: str, source: str) -> _Matrix:
        parameter = self.parameters[name]
        rows, columns = parameter.shape
        asked = self._profile.base if source == BASE else self._profile.quantized
        stored = asked(parameter, self._geometry) if asked is not None else "bf16"
        if not _fits(stored, rows, columns):
            stored = "bf16"
        block = 0
        if stored == "ggml_k":
            block = _Q6_K if _is_sensitive(parameter, self._geometry) else _Q4_K
        return _Matrix((rows, columns), stored, block)

    def import_obstacle(self, name: str, source: str) -> str | None:
        return None

    def _order(self, parameter: Parameter) -> Blocks | None:
        """The columns of `gdn/output` stand head by head; GGUF exporters tile the heads."""
        g = self._geometry
        if not self._profile.is_gguf or not parameter.name.endswith("gdn/output"):
            return None
        return Blocks(g.value_dim, untiled(g.key_heads, g.value_heads))


def _fits(format: str, rows: int, columns: int) -> bool:
    try:
        encoded_bytes(format, default_layout(format), (rows, columns), q6_rows=0)
    except FormatError:
        return False
    return True


def _is_sensitive(parameter: Parameter, geometry: Geometry) -> bool:
    """Q6_K in llama.cpp's mix Q4_K_M: the head, and value and down projections of the first and the last
    eighth of the blocks and of every third one between (GDN keeps query, key and value in one tensor)."""
    name = parameter.name
    if name in (recipes.HEAD, recipes.EMBEDDING):
        return name == recipes.HEAD or geometry.is_tied
    if not name.endswith(("attention/value", "gdn/query", "gdn/key", "gdn/value", "mlp/down")):
        return False
    index, blocks = int(name.split("/")[2]), len(geometry.layers)
    eighth = blocks // 8
    return index < eighth or index >= 7 * blocks // 8 or (index - eighth) % 3 == 2
