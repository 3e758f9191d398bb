"""What tools have in common in every API."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.serve.errors import ApiError
from ninfer.serve.fields import Fields
from ninfer.serve.tools import arguments_of, read_name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"b": 1, "a": 12345678901234567890123}', {"b": 1, "a": 12345678901234567890123}),
        (r'{"a": "\ud83d\ude00"}', {"a": "\U0001f600"}),
        ({"a": 1}, {"a": 1}),
        (None, {}),
        (" \n", {}),
    ],
)
def test_arguments_of_a_call_in_the_history(text: Any, expected: dict[str, Any]) -> None:
    assert arguments_of(text) == expected


@pytest.mark.parametrize(
    "text", ['{"a', "[1]", "7", '{"a": NaN}', r'{"a": "\ud800"}', r'{"\udc00": 1}', "[" * 100_000]
)
def test_arguments_that_are_no_object_are_shown_as_they_are(text: str) -> None:
    assert arguments_of(text) == {"arguments": text}


@pytest.mark.parametrize("name", ["f", "a.b/c:d", "two words", "ü" * 128])
def test_names_that_stand_in_a_call(name: str) -> None:
    assert read_name(Fields({"name": name})) == name


@pytest.mark.parametrize("name", ["", " f", "f ", "a>b", "a=b", "a\nb", 'a"b', "f" * 129, None, 3])
def test_names_that_do_not(name: Any) -> None:
    with pytest.raises(ApiError, match=r"tools\[0\].name must have 1 to 128 characters") as refused:
        read_name(Fields({"name": name}, "tools[0]"))
    assert refused.value.code == "invalid_tool_name"
