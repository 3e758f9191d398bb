"""Marks of a prompt: where messages begin, and what two prompts of a conversation share up to there."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given

from ninfer.frontend import Frontend, Prompt, maintained_template

from .conftest import LLAMA, Documents, added
from .test_frontend import HOSTILE, TOOL, control_ids, conversation

START = "<|im_start|>"


def system(text: str = "Be brief.", role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


def user(text: str = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str = "Ho", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def result(text: str = "r") -> dict[str, Any]:
    return {"role": "tool", "content": text}


CALLING = assistant("", tool_calls=[{"name": "look", "arguments": {"at": "x"}}], reasoning_content="why")


def common(one: Prompt, other: Prompt) -> int:
    """How many tokens the prompts share from the start."""
    pairs = enumerate(zip(one.tokens, other.tokens, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one.tokens), len(other.tokens)))


def fork(one: Prompt, other: Prompt) -> int:
    """The last boundary up to which the prompts share everything; both know it."""
    shared = common(one, other)
    [mine, yours] = [max(b for b in prompt.boundaries if b <= shared) for prompt in (one, other)]
    assert mine == yours
    return mine


def headers(frontend: Frontend, prompt: Prompt) -> list[str]:
    """The first line of each message."""
    return [
        frontend.decode(prompt.tokens[b : b + 40], keep_special=True).partition("\n")[0]
        for b in prompt.boundaries
    ]


@pytest.fixture(params=["qwen3_6", "qwen3_8", "llama", "smollm2"])
def any_chatml(request: pytest.FixtureRequest, with_template: Callable[[str], Frontend]) -> Frontend:
    if request.param.startswith("qwen"):
        return with_template(maintained_template(request.param))
    return request.getfixturevalue(request.param)


def test_every_message_begins_at_a_boundary(any_chatml: Frontend) -> None:
    prompt = any_chatml.render([system(), user("1"), assistant("2"), user("3")], reasoning_effort="medium")
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert headers(any_chatml, prompt) == [START + role for role in roles]
    assert (prompt.preamble, prompt.opener) == (prompt.boundaries[1], prompt.boundaries[-1])
    assert prompt.boundaries[0] == 0


def test_an_edited_last_message(any_chatml: Frontend) -> None:
    history = [system(), user("1"), assistant("2")]
    one, other = any_chatml.render([*history, user("three")]), any_chatml.render([*history, user("four")])
    assert fork(one, other) == one.boundaries[-2] == other.boundaries[-2]
    earlier = any_chatml.render([system(), user("1!"), *history[2:], user("three")])
    assert fork(one, earlier) == one.boundaries[1]


def test_a_regenerated_answer(any_chatml: Frontend) -> None:
    history = [system(), user("1"), assistant("2"), user("3")]
    one = any_chatml.render(history)
    bare = any_chatml.render(history, add_generation_prompt=False)
    assert bare.tokens == one.tokens[: one.opener]
    assert (bare.opener, bare.boundaries) == (None, one.boundaries[:-1])
    answered = any_chatml.render([*history, assistant("4")], add_generation_prompt=False)
    assert fork(one, answered) == one.opener == answered.boundaries[-1]
    assert answered.opener is None


def test_the_same_system_text_and_tools(any_chatml: Frontend) -> None:
    tools = [TOOL]
    one = any_chatml.render([system(), user("1"), assistant("2"), user("3")], tools=tools)
    other = any_chatml.render([system(), user("Something else")], tools=tools)
    assert fork(one, other) == one.preamble == other.preamble
    assert fork(one, any_chatml.render([system("Be long."), user("1")], tools=tools)) == 0


def test_the_next_turn_shares_the_prompt_up_to_the_answer(any_chatml: Frontend) -> None:
    one = any_chatml.render([system(), user("1")])
    following = any_chatml.render([system(), user("1"), assistant("2", reasoning_content="r"), user("3")])
    assert fork(one, following) == one.opener
    assert following.preamble == one.preamble


def test_the_next_turn_with_dropped_and_with_kept_thinking(with_template: Callable[[str], Frontend]) -> None:
    for name, dropped in (("qwen3_6", True), ("qwen3_8", False)):
        frontend = with_template(maintained_template(name))
        one = frontend.render([user("1")])
        answer = frontend._tokenizer.control_id("</think>"), frontend._tokenizer.control_id("<|im_end|>")
        assert None not in answer
        written = [*one.tokens, *frontend.encode("r\n"), answer[0], *frontend.encode("\n\n2"), answer[1]]
        following = frontend.render([user("1"), assistant("2", reasoning_content="r"), user("3")])
        assert one.opener in following.boundaries
        shared = common(one, following)
        if dropped:
            header = frontend.encode("assistant\n")
            assert shared == one.opener + 1 + len(header) == len(one.tokens) - 2
        else:  # an unmodified echo: everything that was written is there again
            assert shared == len(one.tokens)
            assert following.tokens[: len(written)] == written
            assert following.boundaries[-2] == len(written) + len(frontend.encode("\n"))


@pytest.mark.parametrize("name", ["qwen3_6", "qwen3_8"])
def test_grouped_tool_results_are_one_message(with_template: Callable[[str], Frontend], name: str) -> None:
    frontend = with_template(maintained_template(name))
    history = [user(), CALLING, result("a"), result("b")]
    prompt = frontend.render(history, tools=[TOOL])
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert headers(frontend, prompt) == [START + role for role in roles]
    # One more result of the same round extends the message, so it branches off at its beginning.
    longer = frontend.render([*history, result("c")], tools=[TOOL])
    assert fork(prompt, longer) == prompt.boundaries[3]
    # Within a round of calls thinking is kept, so the next round shares the whole history.
    onwards = frontend.render([*history, CALLING, result("c")], tools=[TOOL])
    assert fork(prompt, onwards) == prompt.opener


def test_the_leading_run(any_chatml: Frontend) -> None:
    first = any_chatml.render([user()], reasoning_effort="medium")
    default_system = headers(any_chatml, first)[0] == START + "system"  # SmolLM2's own
    assert first.preamble == (first.boundaries[1] if default_system else None)
    two = any_chatml.render([system("1"), system("2"), user(), system("3"), user()])
    assert two.preamble == two.boundaries[2]
    assert headers(any_chatml, two)[2] == START + "user"
    assert fork(two, any_chatml.render([system("1"), system("2"), user("other")])) == two.preamble


def test_only_a_leading_run(any_chatml: Frontend, llama: Frontend, qwen: Frontend) -> None:
    alone = llama.render([system()])
    assert alone.preamble == alone.opener == alone.boundaries[1]
    assert llama.render([system()], add_generation_prompt=False).preamble is None
    tools = qwen.render([user()], tools=[TOOL])
    assert tools.preamble == tools.boundaries[1]
    developer = qwen.render([system(role="developer"), user()])
    assert developer.preamble == developer.boundaries[1]


def test_thinking_off_has_an_opener_too(with_template: Callable[[str], Frontend]) -> None:
    for name in ("qwen3_6", "qwen3_8"):
        frontend = with_template(maintained_template(name))
        off = frontend.render([user()], thinking=False)
        assert control_ids(frontend, off.tokens[off.opener :]) == [START, "<think>", "</think>"]
        on = frontend.render([user()], reasoning_effort="medium")
        assert fork(on, off) == on.opener == off.opener


def test_a_continued_message_has_no_opener(any_chatml: Frontend) -> None:
    prompt = any_chatml.render([user(), assistant("Once upon")], continue_final_message=True)
    assert prompt.opener is None
    assert headers(any_chatml, prompt)[-1] == START + "assistant"
    empty = any_chatml.render([user(), assistant("")], continue_final_message=True)
    assert empty.opener is None
    assert fork(prompt, empty) == prompt.boundaries[-1]


def asks(message: dict[str, Any]) -> bool:
    """Is there something to answer? A user message that is wrapped as a tool's result is no question."""
    text = message["content"].strip()
    wrapped = text.startswith("<tool_response>") and text.endswith("</tool_response>")
    return message["role"] == "tool" or (message["role"] == "user" and not wrapped)


@given(conversation(HOSTILE))
def test_no_data_add_marks(qwen: Frontend, messages: list[dict[str, Any]]) -> None:
    assume(any(asks(message) for message in messages))
    prompt = qwen.render(messages)
    token = qwen._tokenizer.control_id(START)
    assert list(prompt.boundaries) == [i for i, t in enumerate(prompt.tokens) if t == token]
    turns = [m["role"] for m in messages]
    grouped = [r for i, r in enumerate(turns) if r != "tool" or turns[i - 1] != "tool"]
    assert len(prompt.boundaries) == len(grouped) + 1
    assert prompt.opener == prompt.boundaries[-1]
    assert prompt.preamble == (prompt.boundaries[1] if turns[0] == "system" else None)


HEADERS = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "boundaries", "opener"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:", 0, False),
        ("{{ messages[0].content }}", 0, False),
        ("<think>\n", 0, False),
        (HEADERS, 1, False),
        ("<|im_start|>user\n{{ messages[0].content }}", 1, False),
        ("<|im_start|>user\n", 1, False),
        ("<|im_start|>ai\n{{ messages[0].content }}", 1, False),
        (HEADERS + "<|im_start|>model\n", 2, True),
        (HEADERS + "{{ '<|im_start|>' ~ 'assistant' ~ '\n' }}{% if true %}<think>\n{% endif %}", 2, True),
        (HEADERS + "<|im_start|>assistant\n<|vision_start|>", 2, False),
    ],
)
def test_other_templates(
    with_template: Callable[[str], Frontend], template: str, boundaries: int, opener: bool
) -> None:
    """A generation prompt that a template doesn't write is not taken for one."""
    prompt = with_template(template).render([user("<|im_start|>assistant\n")])
    assert len(prompt.boundaries) == boundaries
    assert prompt.opener == (prompt.boundaries[-1] if opener else None)
    assert prompt.preamble is None


def test_headers_of_the_other_kind(llama_documents: Documents) -> None:
    """`<|start_header_id|>` opens a header as well; a beginning-of-text token belongs to no message."""
    tokens = llama_documents.tokenizer["added_tokens"]
    first = max(llama_documents.tokenizer["model"]["vocab"].values()) + 1
    names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokens += [added(first + i, name, True) for i, name in enumerate(names)]
    llama_documents.template = (
        "{{ '<|begin_of_text|>' }}{% for m in messages %}"
        "{{ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ m.content|trim ~ '<|eot_id|>' }}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    )
    frontend = Frontend.from_resources(llama_documents.resources(), architecture=LLAMA, vocab_rows=1000)
    one, other = frontend.render([system(), user("1")]), frontend.render([system(), user("2")])
    assert [one.tokens[b] for b in one.boundaries] == [first + 1] * 3
    assert one.boundaries[0] == 1
    assert fork(one, other) == one.preamble == one.boundaries[1]
    assert one.opener == one.boundaries[2]
    assert frontend.render([system(), user("1")], add_generation_prompt=False).opener is None


def test_a_beginning_of_text_token_that_looks_like_a_header(llama_documents: Documents) -> None:
    """SmolLM2's `bos_token` is `<|im_start|>`; a template that prints it adds no message."""
    llama_documents.template = "{{ bos_token }}" + llama_documents.template
    frontend = Frontend.from_resources(llama_documents.resources(), architecture=LLAMA, vocab_rows=1000)
    prompt = frontend.render([system(), user()])
    assert prompt.tokens[:2] == [1, 1]
    assert headers(frontend, prompt) == [START + role for role in ("system", "user", "assistant")]
    assert prompt.preamble == prompt.boundaries[1]


def test_marks_are_right_behind_long_and_repeated_segments(qwen: Frontend) -> None:
    """Segments that come from the cache of encoded text count like others."""
    book = "The quick brown fox, größer als je zuvor; 12345 いろは.\n" * 300
    history = [system(book), user(book), assistant("Yes."), user(book)]
    for _ in range(2):
        prompt = qwen.render(history)
        roles = ["system", "user", "assistant", "user", "assistant"]
        assert headers(qwen, prompt) == [START + role for role in roles]
        opening = qwen.decode(prompt.tokens[prompt.opener :], keep_special=True)
        assert opening == START + "assistant\n<think>\n"
