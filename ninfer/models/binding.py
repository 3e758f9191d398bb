"""From an artifact's logical parameters to weights on a device, every rule of the binder checked.

A quantized parameter is a stack of whole rows of encoded parents; nothing is copied, and a parent is placed
on the device once however many parameters share it. A direct parameter (bf16, fp16, fp32, int32 words) may be
any sequence of element ranges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from ninfer.errors import ModelError
from ninfer.ops import ActivationPolicy, Encoded, Matrix, Role, RowSpan, Upload, place

if TYPE_CHECKING:
    from ninfer.artifact import Binding, Component, Contents, Use

DIVISOR = "activation_input_divisor"
_DIRECT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int32": torch.int32}
_POLICIES = {
    "A16Only": ActivationPolicy.A16,
    "AllowA8": ActivationPolicy.A8,
    "AllowA4": ActivationPolicy.A4,
}


def component(artifact: Contents, name: str) -> Component:
    """The component's record; absent means that the artifact was made without this feature."""
    found = artifact.components.get(name)
    if found is None:
        raise ModelError(
            f"{artifact.path} has no component '{name}' (it has: {', '.join(sorted(artifact.components))}); "
            f"convert the checkpoint again with it"
        )
    return found


def public_domain(requested: int | None, vocab_size: int) -> int:
    """How many ids are public: what the tokenizer addresses, at most the rows of the vocabulary matrices."""
    if requested is None:
        return vocab_size
    if not 1 <= requested <= vocab_size:
        raise ModelError(
            f"the tokenizer has {requested} tokens, but the model's vocabulary has {vocab_size} rows"
        )
    return requested


class Binder:
    """Binds the parameters of one artifact on one device, to which `upload` brings them (`ops.uploading`)."""

    def __init__(self, artifact: Contents, device: torch.device, upload: Upload | None = None) -> None:
        self._artifact = artifact
        self._device = device
        self._upload = upload
        self._uses: dict[tuple[str, str], Use] = {(use.parameter, use.input): use for use in artifact.uses}
        # Weak: bytes that were made or brought to the device go when the matrices on them have been placed.
        self._parents: MutableMapping[str, Encoded] = WeakValueDictionary()

    def table(self, name: str, shape: tuple[int, int]) -> Matrix:
        """A matrix that is looked up by rows instead of multiplied: no Use."""
        return self._placed(self._matrix(name, self._binding(name, shape), shape), Role.TABLE)

    def matrix(self, name: str, shape: tuple[int, int], input: str, role: Role = Role.LINEAR) -> Matrix:
        """A matrix applied to the mathematical input `input`."""
        return self._placed(self._projection(name, shape, input, {})[0], role)

    def permuted(
        self, name: str, shape: tuple[int, int], input: str, role: str, blocks: int
    ) -> tuple[Matrix, torch.Tensor | None]:
        """A projection whose columns may be stored as permuted blocks.

        Returns it with the auxiliary `role`, int32 `[blocks]`: stored column block j multiplies block
        `order[j]` of the input. None where the Use has no such auxiliary: natural order.
        """
        matrix, auxiliaries = self._projection(name, shape, input, {role: blocks})
        order = auxiliaries.get(role)
        if order is not None and sorted(order.tolist()) != list(range(blocks)):
            raise ModelError(f"auxiliary '{role}' of '{name}' must be a permutation of 0..{blocks - 1}")
        return self._placed(matrix, Role.LINEAR), None if order is None else self._brought(order)

    def stack(
        self, members: Sequence[tuple[str, tuple[int, int]]], input: str, role: Role = Role.LINEAR
    ) -> Matrix:
        """Projections of one input as one matrix; parents packed in this order stay one span."""
        parts = [self._projection(name, shape, input, {})[0] for name, shape in members]
        return self._placed(Matrix.stack(parts), role)

    def vector(self, name: str, shape: tuple[int, ...], format: str = "bf16") -> torch.Tensor:
        """A direct parameter, in the required format and C order."""
        return self._brought(self._direct(self._binding(name, shape), f"parameter '{name}'", shape, format))

    def _placed(self, matrix: Matrix, role: Role) -> Matrix:
        place(matrix, self._device, role, self._upload)
        return matrix

    def _brought(self, vector: torch.Tensor) -> torch.Tensor:
        return vector.to(self._device) if self._upload is None else self._upload(vector)

    def _projection(
        self, name: str, shape: tuple[int, int], input: str, tables: Mapping[str, int]
    ) -> tuple[Matrix, dict[str, torch.Tensor]]:
        binding = self._binding(name, shape)
        use = self._uses.get((name, input))
        if use is None:
            raise ModelError(f"parameter '{name}' has no Use for its input '{input}'")
        if use.activation_policy is None:
            raise ModelError(f"the Use of '{name}' for '{input}' lacks an activation policy")
        matrix = self._matrix(name, binding, shape)
        matrix.policy = _POLICIES[use.activation_policy]
        auxiliaries = self._auxiliaries(use, tables)
        nvfp4 = any(span.parent.format == "nvfp4" for span in matrix.spans)
        if nvfp4 and use.activation_policy == "AllowA4" and DIVISOR not in use.auxiliaries:
            raise ModelError(
                f"the Use of '{name}' for '{input}' allows A4, so it needs the auxiliary '{DIVISOR}'"
            )
        return matrix, auxiliaries

    def _binding(self, name: str, shape: tuple[int, ...]) -> Binding:
        binding = self._artifact.bindings.get(name)
        if binding is None:
            raise ModelError(f"the artifact does not bind the parameter '{name}'")
        self._check_coverage(binding, f"parameter '{name}'", shape)
        return binding

    def _check_coverage(self, binding: Binding, owner: str, shape: tuple[int, ...]) -> None:
        if binding.whole and self._artifact.tensor(binding[0].object).shape != shape:
            raise ModelError(
                f"{owner} must have shape {list(shape)}, but the object that it names as a whole, "
                f"'{binding[0].object}', has {list(self._artifact.tensor(binding[0].object).shape)}"
            )
        covered = binding.elements
        if covered != math.prod(shape):
            raise ModelError(
                f"{owner} must have shape {list(shape)}, {math.prod(shape)} elements, "
                f"but its parts cover {covered}"
            )

    def _matrix(self, name: str, binding: Binding, shape: tuple[int, int]) -> Matrix:
        columns = shape[1]
        spans = []
        for part in binding:
            tensor = self._artifact.tensor(part.object)
            if tuple(tensor.shape[1:]) != (columns,) or part.begin % columns or part.end % columns:
                if tensor.format in _DIRECT:
                    return Matrix.of(self._gathered(name, binding, shape, tensor.format))
                raise ModelError(
                    f"parameter '{name}' must take whole rows of {columns} elements, but its part "
                    f"[{part.begin}, {part.end}) of the {tensor.format} object '{part.object}' "
                    f"{list(tensor.shape)} doesn't"
                )
            spans.append(RowSpan(self._parent(part.object), part.begin // columns, part.end // columns))
        return Matrix(spans)

    def _parent(self, object_id: str) -> Encoded:
        parent = self._parents.get(object_id)
        if parent is None:
            tensor = self._artifact.tensor(object_id)
            data = self._data(object_id)
            if tensor.format == "nvfp4":
                divisor = float(data[-4:].clone().view(torch.float32))
                if not (math.isfinite(divisor) and divisor > 0):
                    raise ModelError(
                        f"the divisor of object '{object_id}' must be positive and finite, not {divisor}"
                    )
            parent = Encoded(tensor.format, tensor.layout, tuple(tensor.shape), data)
            self._parents[object_id] = parent
        return parent

    def _gathered(self, name: str, binding: Binding, shape: tuple[int, int], format: str) -> Encoded:
        """A direct matrix whose parts are reshaped or broken rows: the one case that copies."""
        words = self._direct(binding, f"parameter '{name}'", shape, format).reshape(-1).view(torch.uint8)
        return Encoded(format, self._artifact.tensor(binding[0].object).layout, shape, words)

    def _direct(self, binding: Binding, owner: str, shape: tuple[int, ...], format: str) -> torch.Tensor:
        pieces = []
        for part in binding:
            tensor = self._artifact.tensor(part.object)
            if tensor.format != format:
                raise ModelError(
                    f"{owner} must have format '{format}', but object '{part.object}' is '{tensor.format}'"
                )
            pieces.append(self._data(part.object).view(_DIRECT[format])[part.begin : part.end])
        return torch.cat(pieces).reshape(shape)

    def _auxiliaries(self, use: Use, tables: Mapping[str, int]) -> dict[str, torch.Tensor]:
        bound = {}
        for role, binding in use.auxiliaries.items():
            if role != DIVISOR and role not in tables:
                raise ModelError(
                    f"the Use of '{use.parameter}' for '{use.input}' has the unknown auxiliary '{role}'"
                )
            owner = f"auxiliary '{role}' of '{use.parameter}' for '{use.input}'"
            if role == DIVISOR:
                self._check_coverage(binding, owner, ())
                value = float(self._direct(binding, owner, (), "fp32"))
                if not (math.isfinite(value) and value > 0):
                    raise ModelError(f"{owner} must be positive and finite, not {value}")
            else:
                self._check_coverage(binding, owner, (tables[role],))
                bound[role] = self._direct(binding, owner, (tables[role],), "int32")
        return bound

    def _data(self, object_id: str) -> torch.Tensor:
        """The object's bytes; the artifact has checked their size, layout and format."""
        return self._artifact.object_tensor(object_id, self._device)
