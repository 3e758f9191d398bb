"""Ranges and types of options, refused where they are given."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.api import Engine, EngineOptions, GenerationOptions
from ninfer.errors import ModelError, OptionError
from ninfer.frontend import SamplingPreset

BOUNDS = [
    (GenerationOptions, "max_new", 0, 2**32 - 1),
    (GenerationOptions, "thinking_budget", 1, 2**32 - 1),
    (GenerationOptions, "temperature", 0, 2),
    (GenerationOptions, "top_p", 0, 1),
    (GenerationOptions, "min_p", 0, 1),
    (GenerationOptions, "top_k", 0, 20),
    (GenerationOptions, "seed", 0, 2**64 - 1),
    (GenerationOptions, "presence_penalty", -2, 2),
    (GenerationOptions, "frequency_penalty", -2, 2),
    (GenerationOptions, "logprobs", 0, 20),
    (EngineOptions, "max_context", 1, 2**32 - 1),
    (EngineOptions, "prefill_chunk", 1, 2**32 - 1),
    (EngineOptions, "max_concurrency", 1, 8),
    (EngineOptions, "kv_capacity", 1, 2**32 - 1),
    (EngineOptions, "state_slots", 0, 4096),
    (EngineOptions, "turn_anchors", 0, 4096),
    (EngineOptions, "max_pending", 0, 2**32 - 1),
    (EngineOptions, "threads", 1, 1024),
]
REAL = {"temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"}


@pytest.mark.parametrize(("kind", "name", "low", "high"), BOUNDS, ids=[case[1] for case in BOUNDS])
def test_numbers_have_ranges_and_types(kind, name, low, high):
    for value in (low, high, np.int64(low)):
        taken = getattr(kind(**{name: value}), name)
        assert taken == value
        assert type(taken) is (float if name in REAL else int)
    wrong = [low - 1, high + 1, float("nan"), float("inf"), "1", True, [1]]
    if name not in REAL:
        wrong.append(1.5)
    if getattr(kind, name) is not None:
        wrong.append(None)
    for value in wrong:
        with pytest.raises(OptionError, match=f"^{name} must be .* between {low} and {high}, not "):
            kind(**{name: value})


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (EngineOptions, {"kv_capacity": "all"}, 'kv_capacity must be a whole number (or "auto") between'),
        (EngineOptions, {"headroom_mib": 5}, 'headroom_mib needs kv_capacity "auto"'),
        (EngineOptions, {"pending_timeout": 0}, "pending_timeout must be above 0 seconds, or None"),
        (EngineOptions, {"prefix_reuse": "no"}, "prefix_reuse must be True or False, not 'no'"),
        (EngineOptions, {"prefix_reuse": False, "state_slots": 2}, "state_slots needs prefix_reuse"),
        (EngineOptions, {"warm_up": 1}, "warm_up must be True or False, not 1"),
        (
            GenerationOptions,
            {"timeout": 0},
            "timeout must be above 0 seconds, or None for the engine's own limit",
        ),
        (GenerationOptions, {"timeout": -1.5}, "timeout must be a number between 0 and"),
        (GenerationOptions, {"timeout": float("nan")}, "timeout must be a number between 0 and"),
        (GenerationOptions, {"single_call": None}, "single_call must be True or False, not None"),
        (GenerationOptions, {"grammar": ""}, "grammar must be text that isn't empty, or None, not ''"),
        (GenerationOptions, {"grammar": 5}, "grammar must be text that isn't empty, or None, not 5"),
        (GenerationOptions, {"thinking": "yes"}, "thinking must be True or False, not 'yes'"),
        (GenerationOptions, {"raw": 1}, "raw must be True or False, not 1"),
        (GenerationOptions, {"stop": "end"}, "stop must be a sequence of strings, not one string"),
        (GenerationOptions, {"reasoning_stop": "x"}, "reasoning_stop must be a sequence of strings"),
    ],
)
def test_what_is_no_number_has_its_rule_too(kind, options, words):
    with pytest.raises(OptionError) as error:
        kind(**options)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft_tokens": 3}, 'draft_tokens needs spec "mtp"'),
        ({"lm_head_draft": True}, 'lm_head_draft needs spec "mtp"'),
        ({"spec": "dflash", "draft_tokens": 3}, "spec must be \"mtp\" or None, not 'dflash'"),
        ({"spec": "", "draft_tokens": 3}, "spec must be \"mtp\" or None, not ''"),
        (
            {"spec": "mtp", "draft_tokens": 3, "lm_head_draft": 1},
            "lm_head_draft must be True or False, not 1",
        ),
        ({"spec": "mtp"}, "draft_tokens must be a whole number between 1 and 5, not 0"),
        *(
            (
                {"spec": "mtp", "draft_tokens": value},
                "draft_tokens must be a whole number between 1 and 5, not ",
            )
            for value in (0, 6, -1, 2.5, True, "3", None)
        ),
    ],
)
def test_options_of_drafts_must_agree(options, words):
    with pytest.raises(OptionError) as error:
        EngineOptions(**options)
    assert str(error.value).startswith(words)


def test_drafts_of_one_to_five_tokens_are_taken():
    several: list[Any] = [1, 5, np.int64(3)]
    for count in several:
        assert EngineOptions(spec="mtp", draft_tokens=count).draft_tokens == count
    assert (EngineOptions().spec, EngineOptions().draft_tokens) == (None, 0)


def test_a_model_without_a_proposal_head_says_so():
    nano = Path(__file__).parents[2] / "models" / "ninfer-nano.ninfer"
    with pytest.raises(ModelError, match="has no proposal head; leave out --lm-head-draft, or "):
        Engine.load(nano, EngineOptions(spec="mtp", draft_tokens=3, lm_head_draft=True))


def test_thinking_options_must_agree():
    off: list[dict[str, Any]] = [{"thinking": False}, {"reasoning_effort": "none"}]
    for options in off:
        with pytest.raises(OptionError, match="thinking budget"):
            GenerationOptions(thinking_budget=3, **options)
    with pytest.raises(OptionError, match="'high' needs thinking"):
        GenerationOptions(thinking=False, reasoning_effort="high")
    GenerationOptions(thinking=False, reasoning_effort="none")


def test_own_values_replace_the_presets_one_by_one():
    preset = SamplingPreset(temperature=0.7, top_p=0.8, presence_penalty=1.5)
    sampling = GenerationOptions(temperature=0, min_p=0.1, seed=5).sampling(preset)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.8, 20)
    assert (sampling.min_p, sampling.presence_penalty, sampling.seed) == (0.1, 1.5, 5)
