"""Whatever a body holds, it is read or refused with a 400."""

import copy
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.errors import FrontendError
from ninfer.serve.errors import ApiError
from ninfer.serve.messages.request import read_request
from ninfer.serve.system import fold_system
from tests.serve.fakes import nano_frontend
from tests.serve.messages.conftest import CLIENTS, TERMS, recorded

BODIES: list[Any] = [line["body"] for client in CLIENTS for line in recorded(client)]
WORDS = [
    *(
        "text",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        "image",
        "document",
        "search_result",
    ),
    *(
        "tool_reference",
        "user",
        "assistant",
        "system",
        "ephemeral",
        "1h",
        "enabled",
        "adaptive",
        "any",
        "tool",
    ),
    *("json_schema", "ninfer-reasoning.v1:", "ninfer-reasoning.v1:AAA", "x-anthropic-billing-header:", ""),
    *("\0", "\ufdd0", "<|im_end|>", "toolu_1", "Bash", "custom", "x" * 200),
]
NAMES = [
    *(
        "type",
        "role",
        "content",
        "text",
        "thinking",
        "signature",
        "tool_use_id",
        "tool_name",
        "is_error",
        "id",
    ),
    *(
        "name",
        "input",
        "input_schema",
        "cache_control",
        "ttl",
        "source",
        "data",
        "title",
        "model",
        "messages",
    ),
    *(
        "system",
        "tools",
        "tool_choice",
        "max_tokens",
        "thinking",
        "display",
        "budget_tokens",
        "output_config",
    ),
    *("format", "schema", "effort", "stop_sequences", "stream", "temperature", "top_p", "top_k", "thread"),
    *("context_management", "edits", "chat_template_kwargs", "preserve_thinking", "defer_loading", "strict"),
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, -1, 2, 1024, 2**63, -(2**63), 2**64 - 1, 1e308, -0.0, 0.5])
    | st.sampled_from(WORDS)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=12,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        found += places(inner)
    return found


def damaged(body: Any, values: list[Any], choice: random.Random) -> Any:
    body = copy.deepcopy(body)
    for value in values:
        if not (spots := places(body)):
            break
        container, key = choice.choice(spots)
        match choice.randrange(4):
            case 0:
                del container[key]
            case 1 if isinstance(container, list):
                container.insert(key, copy.deepcopy(choice.choice(container)))
            case _:
                container[key] = value
    return body


def read(body: Any) -> None:
    refused = None
    try:
        generation = read_request(body, TERMS).generation
        fold_system(generation.messages)
        nano_frontend().render(generation.messages[-3:], continue_final_message=generation.continue_final)
    except ApiError as error:
        refused = error
    except FrontendError:
        pass  # a 400 of the service
    assert refused is None or (refused.status == 400 and len(refused.message) < 300)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(BODIES), st.lists(VALUES, min_size=1, max_size=4), st.integers(0, 2**32))
def test_damaged_recordings(body, values, seed):
    read(damaged(body, values, random.Random(seed)))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6), st.lists(VALUES, max_size=4))
def test_made_up_bodies(members, blocks):
    read({"model": "m", "messages": [{"role": "user", "content": blocks}], **members})


def test_deep_values_are_refused_or_read():
    deep: Any = "x"
    for _ in range(900):
        deep = {"properties": deep}
    tools = [
        {"name": "find", "input_schema": {}},
        {"name": "deep", "input_schema": deep, "defer_loading": True},
    ]
    reference = [{"type": "tool_reference", "tool_name": "deep"}]
    call = {"type": "tool_use", "id": "t", "name": "find", "input": deep}
    read(
        {
            "model": "m",
            "tools": tools,
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": [call]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": reference}],
                },
            ],
        }
    )
