"""The named recipes, and loading of recipe files.

A named recipe works for any geometry. Where a format cannot hold a matrix (NVFP4 needs N % 128 = 0 and K
% 64 = 0), that matrix becomes `q8_g32_fp16` instead, its uses allow A16 only, and the report lists it
under `fallbacks`. A recipe file that asks for such a format is refused.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from ninfer.artifact import default_layout, encoded_bytes
from ninfer.convert.recipe import BASE, IMPORT, Recipe
from ninfer.errors import ConversionError, FormatError, NInferError

Configure = Callable[[Recipe], None]

Q4, Q5, Q6, Q8 = "q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16"
NVFP4, FP8, FP8_BLOCK = "nvfp4", "fp8_e4m3fn_row_bf16", "fp8_e4m3fn_block128_bf16"
QUANTIZED = "quantized"
EMBEDDING, HEAD = "text/token_embedding", "text/output_head"
_ENCODER = {Q4: "grouped_absmax", Q5: "grouped_absmax", Q6: "grouped_absmax", Q8: "grouped_absmax"} | {
    NVFP4: "nvfp4_mse",
    FP8: "fp8_row_maxabs",
}
_MIXER = tuple(f"attention/{name}" for name in ("query", "key", "gate", "value", "output")) + tuple(
    f"gdn/{name}" for name in ("query", "key", "value", "z", "output")
)
_MLP = ("mlp/gate", "mlp/up", "mlp/down")
_GATING = ("gdn/a_projection", "gdn/b_projection")
_IMPORT_POLICY = {NVFP4: "AllowA4", FP8: "AllowA8"}


def bf16(recipe: Recipe) -> None:
    """Every parameter in its direct format."""


def qwen3_8_27b(recipe: Recipe) -> None:
    """Groupwise integers: 8-bit endpoints, 4- and 5-bit layers."""
    _groupwise(recipe, endpoints=Q8)


def groupwise_int8(recipe: Recipe) -> None:
    """Every matrix in 8-bit groups; only the small gating projections stay BF16."""
    _draft(recipe)
    _endpoints(recipe, Q8, Q8)
    _encode(recipe, _present(recipe, "text", (*_MIXER, *_MLP)), Q8)


def qwen3_6_27b(recipe: Recipe) -> None:
    """Groupwise integers: 6-bit endpoints, 4- and 5-bit layers."""
    _groupwise(recipe, endpoints=Q6)


def qwen3_6_27b_nvfp4(recipe: Recipe) -> None:
    """NVFP4 imported from `quantized`, BF16 where that checkpoint's makers kept it, 8-bit endpoints."""
    recipe.stored(EMBEDDING, QUANTIZED)
    _draft(recipe)
    _endpoints(recipe, Q8, Q8)
    recipe.separate(_present(recipe, "text", _GATING))
    _import(recipe, _present(recipe, "text", (*_MIXER, *_MLP)), NVFP4)
    kept = [name for name in _present(recipe, "text", _MIXER[:4]) if _layer(name) < 24]
    kept += [name for name in _present(recipe, "text", ("attention/output",)) if _layer(name) in (3, 7)]
    kept += [name for name in _present(recipe, "text", ("gdn/output",)) if _layer(name) == 4]
    if kept:
        recipe.assign(kept, format="bf16", method="cast_direct", source=BASE)
        recipe.use(kept, activation_policy="A16Only")


def qwen3_8_27b_nvfp4(recipe: Recipe) -> None:
    """The official mix imported from `quantized`: FP8 mixers and head, NVFP4 MLPs, FP8 from layer 56 on."""
    recipe.stored(EMBEDDING, QUANTIZED)
    _from_quantized(recipe)
    _draft(recipe)
    _encode(recipe, [EMBEDDING], FP8)
    if not recipe.is_shared(HEAD):
        _import(recipe, [HEAD], FP8)
    recipe.use(HEAD, activation_policy="AllowA8")
    mlp = _present(recipe, "text", _MLP)
    _import(recipe, _present(recipe, "text", _MIXER) + [name for name in mlp if _layer(name) >= 56], FP8)
    _import(recipe, [name for name in mlp if _layer(name) < 56], NVFP4)


def nvfp4_official(recipe: Recipe) -> None:
    """The official mix for any geometry: what the checkpoint has quantized is imported, the rest is encoded.

    FP8 mixers and endpoints; NVFP4 MLPs, but FP8 in the last eighth of the layers. Encoded NVFP4 allows
    A16 only, because no activation divisor is known.
    """
    _from_quantized(recipe)
    _draft(recipe)
    _endpoints(recipe, FP8, FP8)
    recipe.use(HEAD, activation_policy="AllowA8")
    last = len(recipe.config["text"].get("layer_types", ())) or recipe.config["text"]["num_hidden_layers"]
    mlp = _present(recipe, "text", _MLP)
    wanted = dict.fromkeys(_present(recipe, "text", _MIXER), FP8)
    wanted |= {name: NVFP4 if _layer(name) < last - last // 8 else FP8 for name in mlp}
    for name, format in wanted.items():
        _import_or_encode(recipe, name, format)


def quasar(recipe: Recipe) -> None:
    """All layer projections NVFP4 (imported where the checkpoint has them so), FP8 endpoints."""
    _from_quantized(recipe)
    _draft(recipe)
    _endpoints(recipe, FP8, FP8)
    recipe.use(HEAD, activation_policy="AllowA8")
    for name in _present(recipe, "text", (*_MIXER, *_MLP)):
        _import_or_encode(recipe, name, NVFP4)


def fp8_block(recipe: Recipe) -> None:
    """FP8 128x128 blocks imported for all layer projections; endpoints, stem and gating stay BF16."""
    source = _quantized(recipe)
    for name in _present(recipe, "*", (*_MIXER, *_MLP)):
        stored = recipe.stored(name, source)
        if stored != FP8_BLOCK:
            raise ConversionError(
                f"the recipe fp8-block imports checkpoints with FP8 128x128 blocks, but '{name}' is stored "
                f"as {stored}; "
                f"choose another recipe"
            )
        recipe.assign(name, format=FP8_BLOCK, method=IMPORT, source=source)


def preserved(recipe: Recipe) -> None:
    """Every matrix as stored; plain FP32 becomes BF16. Default for GGUF and quantized checkpoints."""
    for name, parameter in recipe.parameters.items():
        if parameter.is_direct or parameter.component == "proposal" or recipe.is_shared(name):
            continue
        stored = recipe.stored(name)
        if stored in ("bf16", "fp16", "fp32"):
            recipe.assign(name, format="fp16" if stored == "fp16" else "bf16")
        else:
            _import_as_stored(recipe, name, stored, BASE)


NAMED: dict[str, Configure] = {
    "bf16": bf16,
    "groupwise-int": qwen3_8_27b,
    "groupwise-int8": groupwise_int8,
    "nvfp4-official": nvfp4_official,
    "quasar": quasar,
    "fp8-block": fp8_block,
    "gguf-preserved": preserved,
    "preserved": preserved,
    "qwen3_6_27b": qwen3_6_27b,
    "qwen3_8_27b": qwen3_8_27b,
    "qwen3_6_27b_nvfp4": qwen3_6_27b_nvfp4,
    "qwen3_8_27b_nvfp4": qwen3_8_27b_nvfp4,
}


def load(text: str) -> Configure:
    """A named recipe, or `FILE.py[:function]` (default function `configure`)."""
    if text in NAMED:
        return NAMED[text]
    match = re.fullmatch(r"(.+):([A-Za-z_]\w*)", text)
    path, function = (Path(match[1]), match[2]) if match else (Path(text), "configure")
    if path.suffix != ".py":
        raise ConversionError(
            f"unknown recipe '{text}'; known are {', '.join(NAMED)}, or a file FILE.py[:function]"
        )
    if not path.is_file():
        raise ConversionError(f"the recipe file {path} does not exist")
    spec = importlib.util.spec_from_file_location("ninfer_recipe", path)
    if spec is None or spec.loader is None:
        raise ConversionError(f"the recipe file {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    _guarded(path, lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    configure = getattr(module, function, None)
    if not callable(configure):
        raise ConversionError(f"the recipe file {path} has no function '{function}'")
    return lambda recipe: _guarded(path, lambda: configure(recipe))


def _guarded(path: Path, action: Callable[[], object]) -> None:
    """Run foreign recipe code; its failure is the recipe's, told with the line that failed."""
    try:
        action()
    except NInferError:
        raise
    except Exception as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
        ]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise ConversionError(f"the recipe failed ({where}): {type(error).__name__}: {error}") from error


def _groupwise(recipe: Recipe, endpoints: str) -> None:
    _draft(recipe)
    _endpoints(recipe, endpoints, endpoints)
    four = ("attention/query", "attention/key", "gdn/query", "gdn/key", "mlp/gate", "mlp/up")
    five = (
        "attention/gate",
        "attention/value",
        "attention/output",
        "gdn/value",
        "gdn/z",
        "gdn/output",
        "mlp/down",
    )
    _encode(recipe, _present(recipe, "text", four), Q4)
    _encode(recipe, _present(recipe, "text", five), Q5)
    recipe.separate(_present(recipe, "text", _GATING))


def _draft(recipe: Recipe) -> None:
    """The part common to all quantizing recipes: every draft projection in 8-bit groups."""
    _encode(
        recipe,
        [name for name, one in recipe.parameters.items() if one.component == "mtp" and not one.is_direct],
        Q8,
    )


def _endpoints(recipe: Recipe, embedding: str, head: str) -> None:
    _encode(recipe, [EMBEDDING], embedding)
    if recipe.is_shared(HEAD):
        return
    if head == FP8:
        _import_or_encode(recipe, HEAD, head)
    else:
        _encode(recipe, [HEAD], head)


def _encode(recipe: Recipe, names: Iterable[str], format: str) -> None:
    for name in names:
        _assign(recipe, name, format, _ENCODER[format], BASE)


def _import(recipe: Recipe, names: Iterable[str], format: str) -> None:
    for name in names:
        recipe.assign(name, format=format, method=IMPORT, source=QUANTIZED)
        recipe.use(name, activation_policy=_IMPORT_POLICY[format])


def _import_or_encode(recipe: Recipe, name: str, format: str) -> None:
    """Import what the source stores as NVFP4 or FP8 rows, whichever it is, else encode in `format`."""
    source = _quantized(recipe)
    stored = recipe.stored(name, source) if recipe.holds(name, source) else "bf16"
    if stored not in _IMPORT_POLICY:
        if _assign(recipe, name, format, _ENCODER[format], BASE) and format == FP8:
            recipe.use(name, activation_policy="AllowA8")
        return
    _import_as_stored(recipe, name, stored, source)


def _import_as_stored(recipe: Recipe, name: str, stored: str, source: str) -> None:
    """Codes as they are, with the widest activation policy that the checkpoint supports."""
    if _assign(recipe, name, stored, IMPORT, source) and recipe.parameters[name].inputs:
        policy = _IMPORT_POLICY.get(stored, "A16Only")
        if policy == "AllowA4" and not recipe.has_input_divisor(name, source):
            policy = "A16Only"
        recipe.use(name, activation_policy=policy)


def _assign(recipe: Recipe, name: str, format: str, method: str, source: str) -> bool:
    """Assign a format, or 8-bit groups where it cannot hold the matrix; True if it can."""
    reason = recipe.import_obstacle(name, source) if method == IMPORT else None
    try:
        encoded_bytes(format, default_layout(format), recipe.parameters[name].shape, q6_rows=0)
    except FormatError as error:
        reason = str(error)
    if reason is not None:
        recipe.assign(name, format=Q8, method=_ENCODER[Q8], source=source)
        recipe.note_fallback(name, format, Q8, reason)
        return False
    recipe.assign(name, format=format, method=method, source=source)
    return True


def _from_quantized(recipe: Recipe) -> None:
    """Direct parameters and gating come from the quantized checkpoint, whose training may have moved them."""
    source = _quantized(recipe)
    if source != BASE:
        names = [name for name, one in recipe.parameters.items() if one.component == "text" and one.is_direct]
        recipe.assign(names + _present(recipe, "text", _GATING), source=source)


def _quantized(recipe: Recipe) -> str:
    return QUANTIZED if QUANTIZED in recipe.sources else BASE


def _present(recipe: Recipe, component: str, suffixes: Iterable[str]) -> list[str]:
    """Parameters of all layers of a component with these names, as far as the architecture has them."""
    found = []
    for suffix in suffixes:
        found += fnmatch.filter(recipe.parameters, f"{component}/layers/*/{suffix}")
    return found


def _layer(name: str) -> int:
    return int(name.split("/")[2])
