"""Default sampling settings by architecture and mode (whether the prompt starts inside a thinking block)."""

from dataclasses import dataclass

from ninfer.errors import FrontendError

QWEN_DENSE = "Qwen3_5ForCausalLM"
QWEN_MOE = "Qwen3_5MoeForCausalLM"
LLAMA = "LlamaForCausalLM"


@dataclass(frozen=True, slots=True)
class SamplingPreset:
    """Settings of one mode; a request overrides them one by one. `top_k` is at most 20, the sampler's cap."""

    temperature: float
    top_p: float
    top_k: int = 20
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


_QWEN_ANSWER = SamplingPreset(temperature=0.7, top_p=0.8, presence_penalty=1.5)
# Llama checkpoints publish no settings that hold for all of them: ours, moderate and without penalties.
_LLAMA = SamplingPreset(temperature=0.7, top_p=0.9)
_PRESETS = {  # architecture: (not thinking, thinking)
    QWEN_DENSE: (_QWEN_ANSWER, SamplingPreset(temperature=1.0, top_p=0.95)),
    QWEN_MOE: (_QWEN_ANSWER, SamplingPreset(temperature=1.0, top_p=0.95, presence_penalty=1.5)),
    LLAMA: (_LLAMA, _LLAMA),
}


def sampling_preset(architecture: str, *, thinking: bool) -> SamplingPreset:
    """The preset for a model's architecture name. Raises FrontendError for an unknown one."""
    modes = _PRESETS.get(architecture)
    if modes is None:
        raise FrontendError(
            f"There is no frontend for architecture {architecture!r}; known are {', '.join(_PRESETS)}."
        )
    return modes[thinking]
