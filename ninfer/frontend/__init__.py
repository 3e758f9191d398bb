"""Text: tokenizer, chat template, thinking channel, stops, detokenizing. Knows no device and no model."""

from ninfer.frontend.frontend import Frontend, Prompt
from ninfer.frontend.messages import parse_messages_file
from ninfer.frontend.presets import SamplingPreset
from ninfer.frontend.session import OutputSession
from ninfer.frontend.template import maintained_template

__all__ = [
    "Frontend",
    "OutputSession",
    "Prompt",
    "SamplingPreset",
    "maintained_template",
    "parse_messages_file",
]
