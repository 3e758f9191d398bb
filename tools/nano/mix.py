"""What the model is trained on: the share of each source in the tokens of a batch."""

from __future__ import annotations

# Shares are relative. Long-context sources count many tokens per answer, so theirs are large.
TEXT = {"prose": 20.0, "code-files": 10.0}
TASKS = {
    "jsonl32": 4.0,
    "jsonl": 9.0,
    "csv": 3.0,
    "json_schema": 3.0,
    "sort": 2.5,
    "copy": 3.0,
    "add2": 2.0,
    "arith": 4.0,
    "chain": 3.0,
    "logic": 2.5,
    "count": 2.0,
    "function": 3.0,
    "trace": 3.0,
    "fix": 1.5,
    "kv512": 4.0,
    "kv2048": 8.0,
    "kv8192": 10.0,
    "kv_first": 4.0,
    "kv_many": 4.0,
    "needle": 1.5,
    "story": 6.0,
    "story_long": 3.0,
    "to_orvali": 2.5,
    "to_english": 2.5,
    "glossary": 2.0,
    "tool_call": 5.0,
    "tool_result": 2.0,
    "tool_thinking": 3.5,
}
SOURCES = (*TEXT, *TASKS)

# What the MTP layer's own recursion is trained on: answers, of which only kinds that fit a row of 4,096.
RECURSION = {
    "prose": 5.0,
    "code-files": 3.0,
    "jsonl32": 8.0,
    "jsonl": 14.0,
    "csv": 16.0,
    "json_schema": 6.0,
    "sort": 5.0,
    "copy": 5.0,
    "add2": 1.0,
    "arith": 4.0,
    "chain": 3.0,
    "logic": 2.5,
    "count": 2.0,
    "function": 1.5,
    "trace": 3.0,
    "fix": 1.5,
    "kv512": 1.0,
    "kv2048": 1.0,
    "kv_first": 0.5,
    "kv_many": 1.0,
    "needle": 0.5,
    "story": 7.0,
    "story_long": 4.0,
    "to_orvali": 2.0,
    "to_english": 2.0,
    "glossary": 1.0,
    "tool_call": 4.0,
    "tool_result": 2.0,
    "tool_thinking": 4.0,
}

# Lengths of pieces of text, in tokens, and how many of the pieces have each.
PIECES = ((1_024, 0.70), (2_048, 0.20), (4_096, 0.07), (8_192, 0.03))

# The weight of a source's tokens in the loss if not 1: answers to long prompts are few tokens, texts many.
WEIGHTS = {
    "prose": 0.6,
    "code-files": 0.6,
    "kv512": 4.0,
    "kv2048": 8.0,
    "kv8192": 16.0,
    "kv_many": 4.0,
    "kv_first": 8.0,
    "needle": 4.0,
    "add2": 2.0,
}
