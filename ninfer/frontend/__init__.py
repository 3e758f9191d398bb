"""Text: tokenizer, chat template, thinking channel, tool calls, stops, detokenizing, grammars.

Knows no device and no model."""

from ninfer.frontend.constraint import Constraint, Script
from ninfer.frontend.frontend import Frontend, Prompt
from ninfer.frontend.grammar import ANY_OBJECT, json_object, json_schema, tool_calls
from ninfer.frontend.messages import parse_messages_file
from ninfer.frontend.presets import SamplingPreset
from ninfer.frontend.session import OutputSession
from ninfer.frontend.template import maintained_template
from ninfer.frontend.toolcalls import (
    CallArguments,
    CallBegan,
    CallEnded,
    CallEvent,
    CallParser,
    CallReport,
    ContentText,
)

__all__ = [
    "ANY_OBJECT",
    "CallArguments",
    "CallBegan",
    "CallEnded",
    "CallEvent",
    "CallParser",
    "CallReport",
    "Constraint",
    "ContentText",
    "Frontend",
    "OutputSession",
    "Prompt",
    "SamplingPreset",
    "Script",
    "json_object",
    "json_schema",
    "maintained_template",
    "parse_messages_file",
    "tool_calls",
]
