"""From the shipped artifact back to Hugging Face tensors, the reference that all profiles are made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ninfer.artifact import Artifact, Part
from ninfer.artifact.layouts import decode_direct, decode_rows
from ninfer.convert import huggingface
from ninfer.errors import ConversionError
from ninfer.formats import get
from tools.nano import checkpoint
from tools.nano import geometry as g

COMPONENTS = ("text", "mtp")
_BLOCK = {
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_attention_norm",
    "self_attn.k_proj.weight": "attention/key",
    "self_attn.v_proj.weight": "attention/value",
    "self_attn.o_proj.weight": "attention/output",
    "self_attn.q_norm.weight": "attention/query_norm",
    "self_attn.k_norm.weight": "attention/key_norm",
    "linear_attn.in_proj_z.weight": "gdn/z",
    "linear_attn.in_proj_a.weight": "gdn/a_projection",
    "linear_attn.in_proj_b.weight": "gdn/b_projection",
    "linear_attn.A_log": "gdn/a_log",
    "linear_attn.dt_bias": "gdn/dt_bias",
    "linear_attn.norm.weight": "gdn/norm",
    "linear_attn.out_proj.weight": "gdn/output",
    "mlp.gate_proj.weight": "mlp/gate",
    "mlp.up_proj.weight": "mlp/up",
    "mlp.down_proj.weight": "mlp/down",
}
_GLOBAL = {
    "model.embed_tokens.weight": "text/token_embedding",
    "model.norm.weight": "text/final_norm",
    "mtp.fc.weight": "mtp/input_projection",
    "mtp.pre_fc_norm_embedding.weight": "mtp/embedding_norm",
    "mtp.pre_fc_norm_hidden.weight": "mtp/hidden_norm",
    "mtp.norm.weight": "mtp/final_norm",
}


def rebuild(artifact: Path, folder: Path) -> None:
    """Write the Hugging Face folder of an artifact of ninfer-nano, dequantized and rounded to BF16."""
    with Artifact.open(artifact) as opened:
        resources = {role: opened.resource("text", role) for role in checkpoint.RESOURCES}
        checkpoint.write_folder(folder, tensors(opened), resources)


def tensors(artifact: Artifact) -> dict[str, torch.Tensor]:
    """Hugging Face name -> tensor, rounded to BF16 but for A_log and dt_bias."""
    return {name: one.to(checkpoint.dtype_of(name)) for name, one in values(artifact).items()}


def values(artifact: Artifact) -> dict[str, torch.Tensor]:
    """Hugging Face name -> FP32 tensor: exactly what an artifact of any profile says."""
    expected = huggingface.components(g.config(), COMPONENTS, "the geometry")
    found = {name: component.config for name, component in artifact.components.items()}
    if found != expected:
        raise ConversionError(f"{artifact.path} is not {g.NAME} with its MTP layer; its configs differ")
    parents = _Parents(artifact)
    return {
        name: _stored(parents, name).reshape(shape).contiguous()
        for name, shape in checkpoint.tensor_shapes().items()
    }


class _Parents:
    """Parameters as numbers; every object is decoded once."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._decoded: dict[str, torch.Tensor] = {}
        self._head_orders = {
            use.parameter: use.auxiliaries["input_head_order"]
            for use in artifact.uses
            if "input_head_order" in use.auxiliaries
        }

    def read(self, name: str) -> torch.Tensor:
        """The elements of a parameter in logical order, FP32, flat."""
        found = self._joined(self._artifact.parameter(name))
        if name not in self._head_orders:
            return found
        order = self._joined(self._head_orders[name].parts).long()  # head of each stored block of columns
        return found.reshape(g.HIDDEN, g.VALUE_HEADS, -1)[:, order.argsort()].reshape(-1)

    def _joined(self, parts: Sequence[Part]) -> torch.Tensor:
        return torch.cat([self._object(part.object)[part.begin : part.end] for part in parts])

    def _object(self, object_id: str) -> torch.Tensor:
        if object_id not in self._decoded:
            tensor, data = self._artifact.tensor(object_id), self._artifact.object_bytes(object_id)
            if get(tensor.format).kind == "direct":
                numbers = decode_direct(tensor.format, tensor.shape, data).float()
            else:
                numbers = decode_rows(tensor.format, tensor.shape, data, 0, tensor.shape[0])
            self._decoded[object_id] = numbers.reshape(-1)
        return self._decoded[object_id]


def _stored(parents: _Parents, name: str) -> torch.Tensor:
    """One Hugging Face tensor's elements in its order."""
    if name in _GLOBAL:
        return parents.read(_GLOBAL[name])
    component, _, index, suffix = name.replace("model.", "text.", 1).split(".", 3)
    block = f"{component}/layers/{index}/"
    if suffix == "self_attn.q_proj.weight":  # head by head, the query's rows before the gate's
        halves = [
            parents.read(f"{block}attention/{half}").reshape(g.HEADS, g.HEAD_DIM, g.HIDDEN)
            for half in ("query", "gate")
        ]
        return torch.stack(halves, 1)
    if suffix == "linear_attn.in_proj_qkv.weight":
        return torch.cat([parents.read(f"{block}gdn/{part}") for part in ("query", "key", "value")])
    if suffix == "linear_attn.conv1d.weight":  # the artifact's kernel is tap-major
        return parents.read(f"{block}gdn/convolution").reshape(g.TAPS, -1).t()
    return parents.read(block + _BLOCK[suffix])
