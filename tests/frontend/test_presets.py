"""Sampling presets against the table of the specification."""

import pytest

from ninfer.errors import FrontendError
from ninfer.frontend import Frontend, SamplingPreset
from ninfer.frontend.presets import sampling_preset


@pytest.mark.parametrize(
    ("architecture", "thinking", "expected"),
    [
        ("Qwen3_5ForCausalLM", True, (1.0, 0.95, 20, 0, 0, 0)),
        ("Qwen3_5ForCausalLM", False, (0.7, 0.80, 20, 0, 1.5, 0)),
        ("Qwen3_5MoeForCausalLM", True, (1.0, 0.95, 20, 0, 1.5, 0)),
        ("Qwen3_5MoeForCausalLM", False, (0.7, 0.80, 20, 0, 1.5, 0)),
        ("LlamaForCausalLM", False, (0.7, 0.90, 20, 0, 0, 0)),
    ],
)
def test_table(architecture: str, thinking: bool, expected: tuple[float, ...]) -> None:
    preset = sampling_preset(architecture, thinking=thinking)
    assert preset == SamplingPreset(*expected)  # type: ignore[arg-type]


def test_frontend_knows_its_preset(qwen: Frontend) -> None:
    assert qwen.preset(thinking=True).temperature == 1.0
    assert qwen.preset(thinking=False).presence_penalty == 1.5


def test_unknown() -> None:
    with pytest.raises(FrontendError, match="no frontend for architecture 'X'"):
        sampling_preset("X", thinking=True)
