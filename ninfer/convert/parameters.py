"""The logical parameters of a model, in declaration order, and what may be done with each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ninfer.errors import ConversionError

TEXT = "text"
MTP = "mtp"
DRAFTERS = ("mtp", "dflash", "dflash2")
KNOWN_COMPONENTS = ("text", "vision", *DRAFTERS)


@dataclass(frozen=True)
class Parameter:
    """One logical parameter.

    `inputs` are the mathematical inputs it multiplies (none for tables and direct tensors). A direct
    parameter has to be stored in `format`; a matrix may take any format, `format` being its default.
    """

    name: str
    shape: tuple[int, ...]
    component: str
    inputs: tuple[str, ...] = ()
    format: str = "bf16"
    is_direct: bool = False


@dataclass(frozen=True)
class Geometry:
    """Sizes of a text model, read from its component config."""

    is_llama: bool
    hidden: int
    vocab: int
    layers: tuple[str, ...]
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    taps: int
    is_tied: bool

    @staticmethod
    def of(config: Mapping[str, Any]) -> Geometry:
        is_llama = config["architectures"] == ["LlamaForCausalLM"]
        layers = ["full_attention"] * config["num_hidden_layers"] if is_llama else config["layer_types"]
        return Geometry(
            is_llama=is_llama,
            hidden=config["hidden_size"],
            vocab=config["vocab_size"],
            layers=tuple(layers),
            intermediate=config["intermediate_size"],
            heads=config.get("num_attention_heads", 0),
            kv_heads=config.get("num_key_value_heads", 0),
            head_dim=config.get("head_dim", 0),
            key_heads=config.get("linear_num_key_heads", 0),
            key_dim=config.get("linear_key_head_dim", 0),
            value_heads=config.get("linear_num_value_heads", 0),
            value_dim=config.get("linear_value_head_dim", 0),
            taps=config.get("linear_conv_kernel_dim", 0),
            is_tied=config["tie_word_embeddings"],
        )

    @property
    def query_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def gdn_key_rows(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def gdn_value_rows(self) -> int:
        return self.value_heads * self.value_dim


def declare(components: Mapping[str, Mapping[str, Any]]) -> dict[str, Parameter]:
    """Parameters of all components (component id -> config), by name, in declaration order."""
    geometry = Geometry.of(components[TEXT])
    for component in components:
        if component not in (TEXT, MTP):
            raise ConversionError(
                f"component '{component}' cannot be converted by this version; use text or text,mtp"
            )
    found = list(_text(geometry, tuple(components)))
    if MTP in components:
        found += _mtp(geometry)
    return {parameter.name: parameter for parameter in found}


def _text(g: Geometry, components: tuple[str, ...]) -> Iterator[Parameter]:
    head_inputs = tuple(f"{component}/final_hidden" for component in components)
    yield Parameter("text/token_embedding", (g.vocab, g.hidden), TEXT)
    yield Parameter("text/output_head", (g.vocab, g.hidden), TEXT, head_inputs)
    yield _direct("text/final_norm", (g.hidden,), TEXT)
    for index, kind in enumerate(g.layers):
        prefix = f"text/layers/{index}/"
        yield from _llama_block(g, prefix) if g.is_llama else _block(g, prefix, kind, TEXT)


def _mtp(g: Geometry) -> Iterator[Parameter]:
    yield Parameter("mtp/input_projection", (g.hidden, 2 * g.hidden), MTP, ("mtp/stem_input",))
    for norm in ("embedding_norm", "hidden_norm", "final_norm"):
        yield _direct(f"mtp/{norm}", (g.hidden,), MTP)
    yield from _block(g, "mtp/layers/0/", "full_attention", MTP)


def _block(g: Geometry, prefix: str, kind: str, component: str) -> Iterator[Parameter]:
    def matrix(name: str, rows: int, columns: int, source: str) -> Parameter:
        return Parameter(prefix + name, (rows, columns), component, (prefix + source,))

    yield _direct(prefix + "input_norm", (g.hidden,), component)
    if kind == "full_attention":
        yield matrix("attention/query", g.query_rows, g.hidden, "mixer_input")
        yield matrix("attention/gate", g.query_rows, g.hidden, "mixer_input")
        yield matrix("attention/key", g.kv_rows, g.hidden, "mixer_input")
        yield matrix("attention/value", g.kv_rows, g.hidden, "mixer_input")
        yield _direct(prefix + "attention/query_norm", (g.head_dim,), component)
        yield _direct(prefix + "attention/key_norm", (g.head_dim,), component)
        yield matrix("attention/output", g.hidden, g.query_rows, "attention/gated_output")
    else:
        yield _direct(prefix + "gdn/a_log", (g.value_heads,), component, "fp32")
        yield _direct(prefix + "gdn/dt_bias", (g.value_heads,), component, "fp32")
        channels = 2 * g.gdn_key_rows + g.gdn_value_rows
        yield _direct(prefix + "gdn/convolution", (g.taps, channels), component)
        yield matrix("gdn/a_projection", g.value_heads, g.hidden, "mixer_input")
        yield matrix("gdn/b_projection", g.value_heads, g.hidden, "mixer_input")
        yield matrix("gdn/query", g.gdn_key_rows, g.hidden, "mixer_input")
        yield matrix("gdn/key", g.gdn_key_rows, g.hidden, "mixer_input")
        yield matrix("gdn/value", g.gdn_value_rows, g.hidden, "mixer_input")
        yield matrix("gdn/z", g.gdn_value_rows, g.hidden, "mixer_input")
        yield _direct(prefix + "gdn/norm", (g.value_dim,), component)
        yield matrix("gdn/output", g.hidden, g.gdn_value_rows, "gdn/gated_output")
    yield _direct(prefix + "post_attention_norm", (g.hidden,), component)
    yield from _mlp(g, prefix, component)


def _llama_block(g: Geometry, prefix: str) -> Iterator[Parameter]:
    def matrix(name: str, rows: int, columns: int, source: str) -> Parameter:
        return Parameter(prefix + name, (rows, columns), TEXT, (prefix + source,))

    yield _direct(prefix + "input_norm", (g.hidden,), TEXT)
    yield matrix("attention/query", g.query_rows, g.hidden, "mixer_input")
    yield matrix("attention/key", g.kv_rows, g.hidden, "mixer_input")
    yield matrix("attention/value", g.kv_rows, g.hidden, "mixer_input")
    yield matrix("attention/output", g.hidden, g.query_rows, "attention_output")
    yield _direct(prefix + "post_attention_norm", (g.hidden,), TEXT)
    yield from _mlp(g, prefix, TEXT)


def _mlp(g: Geometry, prefix: str, component: str) -> Iterator[Parameter]:
    for name in ("gate", "up"):
        yield Parameter(
            prefix + f"mlp/{name}", (g.intermediate, g.hidden), component, (prefix + "ffn_input",)
        )
    yield Parameter(prefix + "mlp/down", (g.hidden, g.intermediate), component, (prefix + "mlp/product",))


def _direct(name: str, shape: tuple[int, ...], component: str, format: str = "bf16") -> Parameter:
    return Parameter(name, shape, component, (), format, is_direct=True)
