"""The official Anthropic SDK drives the Messages API on ninfer-nano."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic import beta_tool

from tests.serve.e2e import prompts
from tests.serve.e2e.process import ServerProcess

SURE: dict[str, Any] = {
    "model": "any-name",
    "max_tokens": 400,
    "thinking": {"type": "disabled"},
    "extra_body": {"temperature": 0},
}


@pytest.fixture(scope="module")
def client(nano: ServerProcess) -> anthropic.Anthropic:
    return nano.anthropic()


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def results_of(message: Any, results: list[str]) -> Any:
    ids = [block.id for block in message.content if block.type == "tool_use"]
    return user(
        [
            {"type": "tool_result", "tool_use_id": name, "content": result}
            for name, result in zip(ids, results, strict=True)
        ]
    )


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_models_and_counts(client: anthropic.Anthropic) -> None:
    assert next(model.id for model in client.models.list()) == "ninfer-nano"
    assert client.models.retrieve("ninfer-nano").display_name == "ninfer-nano"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude-9")
    asked: dict[str, Any] = {"messages": [user(prompts.SUM)], "system": "Be brief."}
    asked["tools"] = prompts.messages_tools(prompts.ORDER_TOOLS)
    counted = client.messages.count_tokens(model="m", thinking={"type": "disabled"}, **asked)
    answer = client.messages.create(**asked, **SURE)
    used = answer.usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_a_whole_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=[user(prompts.SUM)], **SURE)
    assert (text_of(message), message.stop_reason, message.model) == ("85", "end_turn", "any-name")
    assert message.usage.output_tokens == 3
    assert message._request_id


def test_a_stream_says_the_same(client: anthropic.Anthropic) -> None:
    events = list(client.messages.create(messages=[user(prompts.SUM)], stream=True, **SURE))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    with client.messages.stream(messages=[user(prompts.SUM)], **SURE) as stream:
        assert "".join(stream.text_stream) == "85"
        final = stream.get_final_message()
    assert text_of(final) == "85"
    assert final.usage.output_tokens == 3


@pytest.mark.anyio
async def test_the_async_client(nano: ServerProcess) -> None:
    async with nano.anthropic_async() as client:
        message = await client.messages.create(messages=[user(prompts.SUM)], **SURE)
        assert text_of(message) == "85"
        async with client.messages.stream(messages=[user(prompts.SUM)], **SURE) as stream:
            assert [text async for text in stream.text_stream]
            assert text_of(await stream.get_final_message()) == "85"
        assert (await client.models.list()).data[0].id == "ninfer-nano"
        assert (await client.messages.count_tokens(model="m", messages=[user("hi")])).input_tokens > 3


def test_stops_and_limits(client: anthropic.Anthropic) -> None:
    records = [user(prompts.RECORDS)]
    stopped = client.messages.create(messages=records, stop_sequences=["\x7f", "\n"], **SURE)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "\n")
    assert text_of(stopped) == prompts.RECORD
    cut = client.messages.create(messages=records, **{**SURE, "max_tokens": 2})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)


def test_a_beginning_is_continued(client: anthropic.Anthropic) -> None:
    begun: Any = [user(prompts.SUM), {"role": "assistant", "content": "8"}]
    assert text_of(client.messages.create(messages=begun, **SURE)) == "5"


def test_two_tools_and_their_results(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {**SURE, "tools": prompts.messages_tools(prompts.TWO_TOOLS)}
    question = user(prompts.TWO)
    first = client.messages.create(messages=[question], **asked)
    assert calls_of(first) == prompts.TWO_CALLS
    assert first.stop_reason == "tool_use"
    turn: Any = {"role": "assistant", "content": first.content}
    second = client.messages.create(
        messages=[question, turn, results_of(first, prompts.TWO_RESULTS)], **asked
    )
    assert text_of(second) == prompts.TWO_ANSWER
    known = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0) + first.usage.output_tokens
    assert (second.usage.cache_read_input_tokens or 0) >= known - 1
    one = client.messages.create(
        messages=[question], tool_choice={"type": "auto", "disable_parallel_tool_use": True}, **asked
    )
    assert calls_of(one) == prompts.TWO_CALLS[:1]


def test_a_call_in_a_stream(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {**SURE, "tools": prompts.messages_tools(prompts.ORDER_TOOLS)}
    with client.messages.stream(messages=[user(prompts.ORDER)], **asked) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert calls_of(message) == [prompts.ORDER_CALL]
    assert len(pieces) > 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, {"execute", "download_page"}), ({"type": "tool", "name": "execute"}, {"execute"})],
    ids=["any", "tool"],
)
def test_a_call_that_must_be(client: anthropic.Anthropic, choice: Any, names: set[str], stream: bool) -> None:
    tools = prompts.messages_tools(prompts.COMMAND_TOOLS)
    for temperature in (0, 1):
        asked: dict[str, Any] = {**SURE, "extra_body": {"temperature": temperature}, "tools": tools}
        asked |= {"messages": [user(prompts.SUM)], "tool_choice": choice}
        if stream:
            with client.messages.stream(**asked) as helper:
                message = helper.get_final_message()
        else:
            message = client.messages.create(**asked)
        found = {name for name, _ in calls_of(message)}
        assert found
        assert found <= names
        assert message.stop_reason == "tool_use"
    none = client.messages.create(
        messages=[user(prompts.COMMAND)],
        tools=tools,
        tool_choice={"type": "none"},
        **{**SURE, "max_tokens": 64},
    )
    assert calls_of(none) == []


def test_strict_tools_follow_their_schema(client: anthropic.Anthropic) -> None:
    tool: Any = {"name": "order", "input_schema": prompts.Order.model_json_schema(), "strict": True}
    for _ in range(3):
        message = client.messages.create(
            messages=[user("Please order something nice.")],
            tools=[tool],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            **{**SURE, "extra_body": {"temperature": 1}},
        )
        ((name, value),) = calls_of(message)
        assert name == "order"
        prompts.Order.model_validate(value)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("question", ["An order, please.", prompts.SUM, "Tell me more about it."])
def test_a_schema_is_enforced(client: anthropic.Anthropic, question: str, stream: bool) -> None:
    asked: dict[str, Any] = {**SURE, "extra_body": {"temperature": 1}}
    asked |= {"messages": [user(question)], "output_format": prompts.Choice}
    if stream:
        with client.messages.stream(**asked) as helper:
            message = helper.get_final_message()
    else:
        message = client.messages.parse(**asked)
    assert message.stop_reason == "end_turn"
    assert isinstance(message.parsed_output, prompts.Choice)
    prompts.Choice.model_validate_json(text_of(message))


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_thinking_and_its_replay(client: anthropic.Anthropic, display: Any) -> None:
    """A call after a thought; the thought comes back with its signature, whether or not it was shown."""
    asked: dict[str, Any] = {
        **SURE,
        "thinking": {"type": "enabled", "budget_tokens": 1024, "display": display},
        "tools": prompts.messages_tools(prompts.PARCEL_TOOLS),
        "max_tokens": 2048,
    }
    question = user(prompts.PARCEL)
    with client.messages.stream(messages=[question], **asked) as stream:
        message = stream.get_final_message()
    thought, call = message.content
    assert thought.type == "thinking"
    assert call.type == "tool_use"
    assert ("track_parcel" in thought.thinking) == (display == "summarized")
    assert thought.signature
    assert calls_of(message) == [prompts.PARCEL_CALL]
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens > 3
    turn: Any = {"role": "assistant", "content": message.content}
    after = client.messages.create(messages=[question, turn, results_of(message, ["in Porto"])], **asked)
    used = message.usage
    known = used.input_tokens + (used.cache_read_input_tokens or 0) + used.output_tokens
    assert (after.usage.cache_read_input_tokens or 0) >= known - 1
    assert after.stop_reason == "end_turn"


def test_the_tool_runner_falls_back_to_whole_histories(client: anthropic.Anthropic) -> None:
    """It asks for conversations that the server keeps; after the refusal it sends them whole."""
    asked = []

    @beta_tool
    def buy_item(article: str, count: int, express: bool = False) -> str:
        """Order an article from the shop.

        Args:
            article: Name of the article
            count: How many
            express: Fast delivery
        """
        asked.append((article, count, express))
        return prompts.ORDER_RESULT

    runner = client.beta.messages.tool_runner(
        model="ninfer-nano",
        max_tokens=400,
        tools=[buy_item],
        messages=[{"role": "user", "content": prompts.ORDER}],
        thinking={"type": "disabled"},
        extra_body={"temperature": 0},
    )
    *_, last = list(runner)
    assert asked == [("final guitar", 25, False)]
    assert text_of(last) == prompts.ORDER_ANSWER


def test_the_typed_errors(client: anthropic.Anthropic, nano: ServerProcess) -> None:
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(**{**SURE, "extra_body": {"temperature": 9}}, messages=[user("hi")])
    assert wrong.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert "temperature" in wrong.value.message
    assert wrong.value.request_id
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 8192 maximum"):
        client.messages.create(messages=[user(prompts.long_text(nano, 9_000))], **SURE)
    with pytest.raises(anthropic.NotFoundError):
        client.post("/v1/messages/batches", cast_to=object, body={})
