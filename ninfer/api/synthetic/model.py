"""A model without a file."""

from __future__ import annotations

from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

from ninfer.api.synthetic import resources
from ninfer.api.synthetic.geometries import ALIASES, GEOMETRIES
from ninfer.api.synthetic.profiles import PROFILES, plan
from ninfer.artifact import Component, Contents, Directory, Proposal, place
from ninfer.convert import proposal, text_config
from ninfer.errors import ArtifactError, OptionError

if TYPE_CHECKING:
    import torch

    from ninfer.api.synthetic.weights import Fill
    from ninfer.convert.plan import Weight

_HEAD_GAIN = 2.0
"""So that logits have a standard deviation of about 2: neither a flat distribution nor always one token."""
_EXTRAS = ("", "+mtp", "+mtp+proposal")


class Synthetic(Contents):
    """`synthetic:GEOMETRY/PROFILE`, `…+mtp` with an MTP layer, `…+mtp+proposal` with a head to draft by:
    random weights of a public geometry, in the formats that the converter's recipe gives them, made object by
    object on the device that asks.

    Values have a standard deviation of K^-0.5, norms are near 1, so that activations stay of moderate size
    through all layers. The same name gives the same weights on the same kind of device.
    """

    def __init__(self, name: str) -> None:
        """Raises OptionError for an unknown name, ConversionError where the geometry doesn't fit a format."""
        geometry, slash, profile = name.removeprefix("synthetic:").partition("/")
        profile, plus, extras = profile.partition("+")
        geometry = ALIASES.get(geometry, geometry)
        known = slash and geometry in GEOMETRIES and profile in PROFILES and plus + extras in _EXTRAS
        if not known or (plus and GEOMETRIES[geometry].is_llama):
            raise OptionError(
                f"there is no model '{name}'; synthetic models are called synthetic:GEOMETRY/PROFILE (a "
                f"Qwen with an MTP layer: PROFILE+mtp, with a proposal head too: PROFILE+mtp+proposal), with "
                f"the geometries {', '.join((*GEOMETRIES, *ALIASES))} and the profiles {', '.join(PROFILES)}"
            )
        self._shape = GEOMETRIES[geometry]
        configs = {"text": self._shape.config, **({"mtp": text_config.mtp()} if plus else {})}
        rows = _proposal_rows(self._shape.public_tokens) if "proposal" in extras else 0
        planned = plan(configs, PROFILES[profile], rows)
        self._weights: dict[str, Weight] = {weight.tensor.id: weight for weight in planned.weights}
        self._words = {tensor.id: words for tensor, words in planned.auxiliaries}
        tensors = [weight.tensor for weight in planned.weights] + [one for one, _ in planned.auxiliaries]
        directory = Directory(
            components={
                name: Component(config, proposal=Proposal("indexed", rows) if rows else None)
                if name == "text"
                else Component(config, target="text")
                for name, config in configs.items()
            },
            objects=place(tensors),
            bindings=planned.bindings,
            uses=planned.uses,
            metadata={"name": f"{geometry}-{profile}{plus}{extras}-synthetic"},
            provenance={"synthetic": {"geometry": geometry, "profile": profile}},
        )
        public = f"{geometry}/{profile}{plus}{extras}"
        super().__init__(Path(name), directory, sha256(public.encode()).digest()[:16])

    @property
    def file_bytes(self) -> int:
        return self.directory.payload_end

    @cached_property
    def _resources(self) -> dict[str, bytes]:
        return resources.make(self._shape.public_tokens, is_llama=self._shape.is_llama)

    def resource(self, component: str, role: str) -> bytes:
        if component != "text" or role not in self._resources:
            raise ArtifactError(f"{self.path}: component '{component}' has no resource '{role}'")
        return self._resources[role]

    def object_tensor(self, object_id: str, device: torch.device) -> torch.Tensor:
        import torch

        from ninfer.api.synthetic import weights

        tensor = self.tensor(object_id)
        if object_id in self._words:
            return self._words[object_id].to(device).contiguous().reshape(-1).view(torch.uint8)
        weight = self._weights[object_id]
        name, seed = weight.members[0].parameter, crc32(object_id.encode())
        if name == proposal.TOKEN_IDS:
            rows = torch.arange(tensor.elements, device=device)
            # Evenly spread over the vocabulary: no row has its token's own number but the first.
            ids = rows * self._shape.public_tokens // tensor.elements
            return ids.to(torch.int32).view(torch.uint8)
        if len(tensor.shape) != 2 or name.endswith("convolution"):
            return weights.direct(tensor, _filler(name, is_llama=self._shape.is_llama), device, seed)
        gain = _HEAD_GAIN if "/layers/" not in name else 1.0
        return weights.encoded(tensor, gain * tensor.shape[1] ** -0.5, device, seed, weight.q6)

    def close(self) -> None:
        """There is nothing to let go of."""


def _proposal_rows(public_tokens: int) -> int:
    """The usual number; half of a small vocabulary, so that some tokens are missing there, too."""
    return proposal.ROWS if public_tokens > proposal.ROWS else public_tokens // 2


def _filler(name: str, *, is_llama: bool) -> Fill:
    """What writes a direct tensor's values: norms near their neutral value, decays between fast and slow."""
    if name.endswith("a_log"):
        return lambda words, generator: words.uniform_(0.1, 4, generator=generator).log_()
    if name.endswith("dt_bias"):
        return lambda words, generator: words.uniform_(-6, -2, generator=generator)
    if name.endswith("convolution"):
        return lambda words, generator: words.normal_(0, words.shape[0] ** -0.5, generator=generator)
    # Qwen's norms multiply by 1 + w, except the one inside GDN.
    neutral = 1.0 if is_llama or name.endswith("gdn/norm") else 0.0
    return lambda words, generator: words.normal_(neutral, 0.1, generator=generator)
