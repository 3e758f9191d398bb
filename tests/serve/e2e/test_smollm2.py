"""The official SDKs and a model of another family, which knows neither tools nor thinking."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.serve.e2e import prompts
from tests.serve.e2e.process import ServerProcess

QUESTION: Any = [{"role": "user", "content": "Why is the sky blue?"}]
SURE: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def client(smol: ServerProcess) -> openai.OpenAI:
    return smol.openai()


def test_chat(smol: ServerProcess, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**SURE, "model": smol.name, "messages": QUESTION}
    client.chat.completions.create(**{**asked, "max_tokens": 0})  # from now on the prompt is known
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    text = choice.message.content or ""
    assert "light" in text
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert b"".join(bytes(token.bytes or ()) for token in tokens).decode() == text
    assert all(token.top_logprobs[0].logprob == token.logprob <= 0 for token in tokens)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert (
        client.responses.create(
            model=smol.name, input=QUESTION, temperature=0, max_output_tokens=24
        ).output_text
        == text
    )
    with client.chat.completions.stream(**asked, stop=" ") as stream:
        assert stream.get_final_completion().choices[0].message.content == text.split(" ")[0]


def test_messages(smol: ServerProcess) -> None:
    with smol.anthropic() as client:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 24, "extra_body": {"temperature": 0}}
        message = client.messages.create(messages=QUESTION, **asked)
        assert message.content[0].type == "text"
        text = message.content[0].text
        assert "light" in text
        with client.messages.stream(messages=QUESTION, **asked) as stream:
            assert "".join(stream.text_stream) == text
        counted = client.messages.count_tokens(model="m", messages=QUESTION)
        used = message.usage
        assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


@pytest.mark.parametrize("seed", range(2))
def test_a_schema_is_enforced(smol: ServerProcess, client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.parse(
        model=smol.name, messages=QUESTION, response_format=prompts.Order, temperature=1, seed=seed,
        max_tokens=300,
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    prompts.Order.model_validate_json(answer.choices[0].message.content or "")


def test_a_seed_makes_an_answer(smol: ServerProcess, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**SURE, "model": smol.name, "messages": QUESTION, "temperature": 1, "n": 2}
    client.chat.completions.create(**{**asked, "max_tokens": 0})  # from now on the prompt is known
    one, other, third = (client.chat.completions.create(**asked, seed=seed) for seed in (3, 3, 4))
    texts = [[choice.message.content for choice in answer.choices] for answer in (one, other, third)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


def test_tools_without_a_form_for_them(smol: ServerProcess, client: openai.OpenAI) -> None:
    """They may be offered, since clients do so with every model. A call that must be has the form that our
    other models know, which is enforced."""
    tools = prompts.chat_tools(prompts.ORDER_TOOLS)
    asked: dict[str, Any] = {**SURE, "model": smol.name, "messages": QUESTION}
    assert client.chat.completions.create(**asked, tools=tools).choices[0].message.tool_calls is None
    asked |= {"tools": [openai.pydantic_function_tool(prompts.Order)], "tool_choice": "required"}
    answer = client.chat.completions.parse(**{**asked, "max_tokens": 400}, parallel_tool_calls=False)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.tool_calls
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, prompts.Order)
