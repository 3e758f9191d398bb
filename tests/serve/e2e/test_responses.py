"""The official OpenAI SDK drives the Responses API on ninfer-nano."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.serve.e2e import prompts
from tests.serve.e2e.process import ServerProcess

SURE: dict[str, Any] = {"model": "ninfer-nano", "temperature": 0, "reasoning": {"effort": "none"}}


@pytest.fixture(scope="module")
def client(nano: ServerProcess) -> openai.OpenAI:
    return nano.openai()


def calls_of(response: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(i.name, json.loads(i.arguments)) for i in response.output if i.type == "function_call"]


def test_a_whole_response_is_kept(client: openai.OpenAI) -> None:
    made = client.responses.create(input=prompts.SUM, metadata={"a": "b"}, **SURE)
    assert (made.output_text, made.status, made.error) == ("85", "completed", None)
    assert made.usage is not None
    assert made.usage.output_tokens == 3
    assert client.responses.retrieve(made.id) == made
    (item,) = client.responses.input_items.list(made.id).data
    assert item.type == "message"
    assert item.content[0].to_dict() == {"type": "input_text", "text": prompts.SUM}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.cancel(made.id)
    assert refused.value.code == "background_not_supported"
    client.responses.delete(made.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            gone(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(made.id)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(input="and?", previous_response_id=made.id, **SURE)
    assert unknown.value.param == "previous_response_id"


def test_one_that_is_not_to_be_kept(client: openai.OpenAI) -> None:
    made = client.responses.create(input=prompts.SUM, store=False, **SURE)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    events = list(client.responses.create(input=prompts.SUM, stream=True, **SURE))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "85"
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response == client.responses.retrieve(last.response.id)


@pytest.mark.anyio
async def test_the_async_client(nano: ServerProcess) -> None:
    async with nano.openai_async() as client:
        made = await client.responses.create(input=prompts.SUM, **SURE)
        assert made.output_text == "85"
        assert [i.type async for i in client.responses.input_items.list(made.id)] == ["message"]
        async with client.responses.stream(input=prompts.SUM, **SURE) as stream:
            kinds = [event.type async for event in stream]
            assert (await stream.get_final_response()).output_text == "85"
        assert kinds[-1] == "response.completed"
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


def test_reasoning_is_an_item(client: openai.OpenAI) -> None:
    """And comes back sealed when the history is the client's own; both forms make the same prompt."""
    asked: dict[str, Any] = {**SURE, "reasoning": {"effort": "high", "summary": "auto"}}
    asked["include"] = ["reasoning.encrypted_content"]
    with client.responses.stream(input="Compute 79 + 325.", **asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
        made = stream.get_final_response()
    thought, message = made.output
    assert thought.type == "reasoning"
    assert message.type == "message"
    assert made.output_text == "404"
    assert thought.content
    assert thought.content[0].text == "".join(deltas)
    assert thought.encrypted_content
    more = {"role": "user", "content": "Compute 1 + 1."}
    question = {"role": "user", "content": "Compute 79 + 325."}
    sealed = thought.to_dict() | {"content": None}
    histories = [
        {"previous_response_id": made.id, "input": [more]},
        {"input": [question, *(item.to_dict() for item in made.output), more]},
        {"input": [question, sealed, message.to_dict(), more]},
    ]
    asked["reasoning"] = {**asked["reasoning"], "context": "all_turns"}
    answers = [client.responses.create(**asked, **history) for history in histories]  # type: ignore[arg-type]
    assert len({answer.usage.input_tokens for answer in answers if answer.usage}) == 1
    assert len({answer.output_text for answer in answers}) == 1


def test_a_tool_and_its_result_by_chaining(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**SURE, "tools": prompts.responses_tools(prompts.TWO_TOOLS)}
    first = client.responses.create(input=prompts.TWO, **asked)
    assert calls_of(first) == prompts.TWO_CALLS
    calls = [item for item in first.output if item.type == "function_call"]
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": result}
        for call, result in zip(calls, prompts.TWO_RESULTS, strict=True)
    ]
    second = client.responses.create(input=results, previous_response_id=first.id, **asked)
    assert second.output_text == prompts.TWO_ANSWER
    assert second.previous_response_id == first.id
    whole = [{"role": "user", "content": prompts.TWO}, *first.output, *results]
    again = client.responses.create(input=whole, **asked)
    assert again.output_text == prompts.TWO_ANSWER
    assert first.usage is not None
    assert second.usage is not None
    assert again.usage is not None
    assert again.usage.input_tokens == second.usage.input_tokens
    known = first.usage.total_tokens - 1
    assert second.usage.input_tokens_details.cached_tokens >= known


def test_a_call_in_a_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**SURE, "tools": prompts.responses_tools(prompts.ORDER_TOOLS)}
    with client.responses.stream(input=prompts.ORDER, **asked) as stream:
        events = list(stream)
        made = stream.get_final_response()
    assert calls_of(made) == [prompts.ORDER_CALL]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == prompts.ORDER_CALL[1]
    assert len(deltas) > 2


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"execute", "download_page"}), ({"type": "function", "name": "execute"}, {"execute"})],
    ids=["required", "named"],
)
def test_a_call_that_must_be(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    tools = prompts.responses_tools(prompts.COMMAND_TOOLS)
    for temperature in (0, 1):
        made = client.responses.create(
            input=prompts.SUM,
            tools=tools,
            tool_choice=choice,
            max_output_tokens=200,
            **{**SURE, "temperature": temperature},
        )
        found = {name for name, _ in calls_of(made)}
        assert found
        assert found <= names
    none = client.responses.create(
        input=prompts.COMMAND, tools=tools, tool_choice="none", max_output_tokens=64, **SURE
    )
    assert calls_of(none) == []
    two = client.responses.create(
        input=prompts.TWO,
        tools=prompts.responses_tools(prompts.TWO_TOOLS),
        parallel_tool_calls=False,
        **SURE,
    )
    assert calls_of(two) == prompts.TWO_CALLS[:1]


@pytest.mark.parametrize("stream", [False, True])
def test_schemas_are_enforced(client: openai.OpenAI, stream: bool) -> None:
    """On the text, and on the arguments of strict tools."""
    asked: dict[str, Any] = {**SURE, "temperature": 1, "max_output_tokens": 600}
    if stream:
        with client.responses.stream(input="An order.", text_format=prompts.Order, **asked) as helper:
            made = helper.get_final_response()
    else:
        made = client.responses.parse(input="An order.", text_format=prompts.Order, **asked)
    assert isinstance(made.output_parsed, prompts.Order)
    prompts.Order.model_validate_json(made.output_text)
    tool: Any = {
        "type": "function",
        "name": "order",
        "parameters": prompts.Order.model_json_schema(),
        "strict": True,
    }
    called = client.responses.create(
        input="Please order something.", tools=[tool], tool_choice="required", **asked
    )  # type: ignore[call-overload]
    arguments = [item.arguments for item in called.output if item.type == "function_call"]
    assert arguments
    for text in arguments:
        prompts.Order.model_validate_json(text)


def test_log_probabilities(client: openai.OpenAI) -> None:
    made = client.responses.create(
        input=prompts.SUM, top_logprobs=2, include=["message.output_text.logprobs"], **SURE
    )
    part = made.output[0].content[0]  # type: ignore[union-attr]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(token.token for token in part.logprobs) == "85"
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)


def test_limits(client: openai.OpenAI) -> None:
    cut = client.responses.create(input=prompts.RECORDS, max_output_tokens=3, **SURE)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    counted = client.responses.input_tokens.count(model="ninfer-nano", input=prompts.RECORDS)
    assert cut.usage is not None
    assert abs(counted.input_tokens - cut.usage.input_tokens) < 5  # thinking is another end of the prompt
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input="hi", background=True, **SURE)
    assert refused.value.code == "background_not_supported"
