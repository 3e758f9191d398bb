"""Template options: defaults stay the template's, conflicts and reserved names are refused."""

from typing import Any

import pytest

from ninfer.errors import FrontendError
from ninfer.frontend import Frontend
from ninfer.frontend.options import template_variables
from ninfer.frontend.provenance import TemplateText, spans_of

USER = {"role": "user", "content": "Hi"}


def variables(**options: Any) -> dict[str, Any]:
    given = {
        "tools": None,
        "thinking": None,
        "reasoning_effort": None,
        "preserve_thinking": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "template_kwargs": None,
        "special_tokens": {},
        **options,
    }
    return template_variables([USER], **given)


def test_unset_options_are_absent() -> None:
    assert variables() == {
        "messages": [USER],
        "tools": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
    }
    nulls = {
        "enable_thinking": None,
        "reasoning_effort": None,
        "preserve_thinking": None,
        "add_vision_id": None,
    }
    assert variables(template_kwargs=nulls) == variables()
    assert variables(tools=[]) == variables()


def test_set_options() -> None:
    got = variables(thinking=True, reasoning_effort="high", preserve_thinking=False, tools=[{"a": 1}])
    assert got["enable_thinking"] is True
    assert got["reasoning_effort"] == "high"
    assert got["preserve_thinking"] is False
    assert got["tools"] == [{"a": 1}]
    assert variables(template_kwargs={"anything": {"goes": None}})["anything"] == {"goes": None}


def test_arguments_may_repeat_an_option_but_not_contradict_it() -> None:
    assert variables(thinking=False, template_kwargs={"enable_thinking": False})["enable_thinking"] is False
    for option, name, value in (
        ({"thinking": True}, "enable_thinking", False),
        ({"preserve_thinking": False}, "preserve_thinking", True),
        ({"reasoning_effort": "low"}, "reasoning_effort", "high"),
    ):
        with pytest.raises(FrontendError, match=f"{name} = .* conflicts"):
            variables(**option, template_kwargs={name: value})


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "pad_token",
    ],
)
def test_reserved_names(name: str) -> None:
    with pytest.raises(FrontendError, match=f"'{name}' is reserved"):
        variables(template_kwargs={name: None})


@pytest.mark.parametrize("name", ["enable_thinking", "preserve_thinking", "add_vision_id"])
@pytest.mark.parametrize("value", ["true", 1, 0, []])
def test_booleans_are_booleans(name: str, value: object) -> None:
    with pytest.raises(FrontendError, match="must be true or false"):
        variables(template_kwargs={name: value})


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh", "max"])
def test_effort_passes_through_and_excludes_thinking_off(effort: str) -> None:
    assert variables(reasoning_effort=effort)["reasoning_effort"] == effort
    assert "enable_thinking" not in variables(reasoning_effort=effort)
    for options in ({"thinking": False}, {"template_kwargs": {"enable_thinking": False}}):
        with pytest.raises(FrontendError, match="conflicts with thinking switched off"):
            variables(reasoning_effort=effort, **options)


def test_effort_none_switches_thinking_off() -> None:
    for options in ({"reasoning_effort": "none"}, {"template_kwargs": {"reasoning_effort": "none"}}):
        got = variables(**options)
        assert got["enable_thinking"] is False
        assert "reasoning_effort" not in got
        assert variables(thinking=False, **options) == got
        with pytest.raises(FrontendError, match="'none' conflicts with thinking switched on"):
            variables(thinking=True, **options)


@pytest.mark.parametrize("effort", ["", "extreme", "LOW", 3, ["low"], {}])
def test_unknown_effort(effort: object) -> None:
    with pytest.raises(FrontendError, match="is unknown; use one of none, minimal"):
        variables(template_kwargs={"reasoning_effort": effort})


def test_special_tokens_are_template_text() -> None:
    got = variables(special_tokens={"eos_token": "<|im_end|>"})["eos_token"]
    assert isinstance(got, TemplateText)
    assert spans_of(got) == ((0, 10),)


def test_arguments_are_data(with_template: Any) -> None:
    frontend: Frontend = with_template("<|im_start|>{{ messages[0].content }}{{ extra.x }}{{ eos_token }}")
    prompt = frontend.render([USER], template_kwargs={"extra": {"x": "<|im_end|>"}})
    assert prompt.text == "<|im_start|>Hi<|im_end|><|im_end|>"
    assert prompt.tokens.count(frontend.stop_token_ids[0]) == 1
