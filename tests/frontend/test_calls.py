"""The tool channel: where the text of calls begins and ends, wherever tokens do."""

import time
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.events import Channel, Delta, FinishReason
from ninfer.frontend import Frontend, OutputSession, Prompt

from .test_session import byte_tokens, control

OPEN, CLOSE = "<tool_call>", "</tool_call>"
SPACE = " \t\r\n"
CONTENT, REASONING, TOOL = Channel.CONTENT, Channel.REASONING, Channel.TOOL
PLAIN = Prompt([], "", starts_in_thinking=False, declares_tools=True)
THINKING = Prompt([], "", starts_in_thinking=True, declares_tools=True)
CALL = "<tool_call>\n<function=look>\n<parameter=at>\nthe <b>é</b>\n</parameter>\n</function>\n</tool_call>"

Segments = list[tuple[Channel, str]]


def call_end(text: str, at: int) -> int:
    """Where the call whose opening marker ends at `at` and the space behind it end."""
    depth = 0
    while at < len(text):
        if depth == 0 and text.startswith(CLOSE, at):
            at += len(CLOSE)
            while at < len(text) and text[at] in SPACE:
                at += 1
            return at
        depth += text.startswith("<parameter=", at)
        depth -= depth > 0 and text.startswith("</parameter>", at)
        at += 1
    return at


def split(text: str) -> Segments:
    """The channels of a whole answer, found by looking at all of it."""
    segments: Segments = []
    at = 0
    while at < len(text):
        begin = text.find(OPEN, at)
        if begin < 0:
            return join([*segments, (CONTENT, text[at:])])
        bare = text[at:begin].rstrip(SPACE)
        end = call_end(text, begin + len(OPEN))
        segments += [(CONTENT, bare), (TOOL, text[at + len(bare) : end])]
        at = end
    return join(segments)


def split_before_stop(text: str, stops: Sequence[str]) -> tuple[Segments, FinishReason | None]:
    """The same for an answer that comes character by character and ends at a stop string in content."""
    start = at = 0
    while at < len(text):
        at += 1
        found = max(
            (p for p in (*stops, OPEN) if text.endswith(p, start, at)), key=len, default=None
        )  # earliest begin, then declaration order
        if found == OPEN and OPEN not in stops:
            start = at = call_end(text, at)
        elif found is not None:
            return split(text[: at - len(found)]), FinishReason.STOP_STRING
    return split(text), None


def join(pieces: Iterable[tuple[Channel, str]]) -> Segments:
    """Neighbours of one channel put together, empty ones left out."""
    joined: Segments = []
    for channel, text in pieces:
        if text and joined and joined[-1][0] is channel:
            text = joined.pop()[1] + text
        if text:
            joined.append((channel, text))
    return joined


def drive(session: OutputSession, tokens: Iterable[int]) -> Segments:
    deltas: list[Delta] = []
    for token in tokens:
        deltas += session.push(token).deltas
        if session.finish is not None:
            break
    deltas += session.close().deltas
    return join((d.channel, d.text) for d in deltas)


_PIECES = (
    OPEN, OPEN, CLOSE, CLOSE, CALL, "<parameter=x>", "<parameter=", "</parameter>", "<function=f>",
    "</function>", "<tool", "_call>", "</tool_call", "<", ">", "</", "STOP", "</think>",
    "\n", " ", "\n\n", "\t", "é", "👩‍👩‍👧‍👦",
)  # fmt: skip
PIECES = st.one_of(st.sampled_from(_PIECES), st.text(st.characters(codec="utf-8"), max_size=10))


@st.composite
def answers(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Pieces of text, each with how it is spelled: bytes, the tokens of plain text, or as control tokens."""
    pieces = draw(st.lists(PIECES, max_size=12))
    return [(piece, draw(st.sampled_from(["bytes", "plain", "control"]))) for piece in pieces]


def tokens_of(frontend: Frontend, answer: list[tuple[str, str]]) -> list[int]:
    tokens: list[int] = []
    for piece, spelling in answer:
        token = frontend._tokenizer.control_id(piece)
        if spelling == "bytes":
            tokens += byte_tokens(frontend, piece)
        elif spelling == "control" and token is not None:
            tokens.append(token)
        else:
            tokens += frontend.encode(piece)
    return tokens


@given(answers())
def test_channels_do_not_depend_on_token_boundaries(qwen: Frontend, answer: list[tuple[str, str]]) -> None:
    tokens = tokens_of(qwen, answer)
    text = qwen.decode(tokens)
    got = drive(qwen.session(PLAIN), tokens)
    assert got == split(text)
    assert "".join(piece for _, piece in got) == text


@given(answers(), answers())
def test_calls_after_thinking(
    qwen: Frontend, thoughts: list[tuple[str, str]], answer: list[tuple[str, str]]
) -> None:
    """Inside the thinking block nothing is a call; behind it space is dropped, then all is as without it."""
    tokens = [*tokens_of(qwen, thoughts), control(qwen, "</think>"), *tokens_of(qwen, answer)]
    before, _, after = qwen.decode(tokens).partition("</think>")
    assert drive(qwen.session(THINKING), tokens) == join([(REASONING, before), *split(after.lstrip(SPACE))])


@given(
    answers(),
    st.lists(st.sampled_from(["STOP", "S", "\n\n", " ", "<tool", OPEN, "l>", "é", "<"]), max_size=3),
)
def test_stops_end_content_but_no_call(
    qwen: Frontend, answer: list[tuple[str, str]], stops: list[str]
) -> None:
    text = "".join(piece for piece, _ in answer)
    session = qwen.session(PLAIN, stop=stops)
    assert (drive(session, byte_tokens(qwen, text)), session.finish) == split_before_stop(text, stops)


@given(answers(), st.data())
def test_rounds_publish_what_single_tokens_publish(
    qwen: Frontend, answer: list[tuple[str, str]], data: st.DataObject
) -> None:
    tokens = tokens_of(qwen, answer)
    session, deltas, cursor = qwen.session(PLAIN), [], 0
    while cursor < len(tokens):
        size = data.draw(st.integers(1, 7))
        step = session.accept(tokens[cursor : cursor + size])
        assert all(a.channel is not b.channel for a, b in zip(step.deltas, step.deltas[1:], strict=False))
        deltas += step.deltas
        cursor += size
    deltas += session.close().deltas
    assert join((d.channel, d.text) for d in deltas) == split(qwen.decode(tokens))


TEXT = f"Let me look.\n\n{CALL}\n{CALL}\n\nDone: <tool> </tool_call>"


def test_two_calls_and_text_around_split_anywhere(qwen: Frontend) -> None:
    expected = [
        (CONTENT, "Let me look."),
        (TOOL, f"\n\n{CALL}\n{CALL}\n\n"),
        (CONTENT, "Done: <tool> </tool_call>"),
    ]
    assert split(TEXT) == expected
    assert drive(qwen.session(PLAIN), byte_tokens(qwen, TEXT)) == expected
    for at in range(len(TEXT) + 1):
        tokens = [*qwen.encode(TEXT[:at]), *qwen.encode(TEXT[at:])]
        assert drive(qwen.session(PLAIN), tokens) == expected
        session = qwen.session(PLAIN)  # two long pieces, as no tokenizer has them
        session._route(TEXT[:at])
        session._route(TEXT[at:])
        assert join((d.channel, d.text) for d in session.close().deltas) == expected


@pytest.mark.parametrize("at", range(1, len(OPEN)))
def test_a_marker_is_held_until_it_is_one(qwen: Frontend, at: int) -> None:
    session = qwen.session(PLAIN)
    assert session.accept(byte_tokens(qwen, "a \n" + OPEN[:at])).deltas == (Delta(CONTENT, "a"),)
    assert session.accept(byte_tokens(qwen, OPEN[at:])).deltas == (Delta(TOOL, " \n" + OPEN),)
    partial = qwen.session(PLAIN)
    partial.accept(byte_tokens(qwen, "a \n" + OPEN[:at]))
    assert partial.close().deltas == (Delta(CONTENT, " \n" + OPEN[:at]),)


def test_a_call_streams_as_it_is_written(qwen: Frontend) -> None:
    session = qwen.session(PLAIN)
    for token in [control(qwen, OPEN), *qwen.encode("\n<function=look>\n</func"), control(qwen, CLOSE)]:
        text = qwen.decode([token])
        assert session.push(token).deltas == (Delta(TOOL, text),)
    assert session.accept(qwen.encode(" \n")).deltas == (Delta(TOOL, " \n"),)
    assert session.accept(qwen.encode("So")).deltas == (Delta(CONTENT, "So"),)


@pytest.mark.parametrize("cut", range(len(OPEN), len(CALL)))
def test_an_unfinished_call_stays_in_its_channel(qwen: Frontend, cut: int) -> None:
    for end in ((), (qwen.stop_token_ids[0],)):
        tokens = [*byte_tokens(qwen, "a " + CALL[:cut]), *end]
        assert drive(qwen.session(PLAIN), tokens) == [(CONTENT, "a"), (TOOL, " " + CALL[:cut])]


def test_an_unfinished_character_at_the_end(qwen: Frontend) -> None:
    half = byte_tokens(qwen, "é")[:1]
    assert drive(qwen.session(PLAIN), [*qwen.encode(OPEN), *half]) == [(TOOL, OPEN + "\ufffd")]
    assert drive(qwen.session(PLAIN), [*qwen.encode(CALL), *half]) == [(TOOL, CALL), (CONTENT, "\ufffd")]


def test_markers_inside_a_parameter_are_its_text(qwen: Frontend) -> None:
    value = f"print('{CLOSE}')\n<parameter=x>{CLOSE}</parameter>\n</function>\n{CLOSE}\nSTOP"
    call = f"{OPEN}\n<function=write>\n<parameter=text>\n{value}\n</parameter>\n</function>\n{CLOSE}"
    for tokens in (qwen.encode(call + "STOP"), byte_tokens(qwen, call + "STOP")):
        session = qwen.session(PLAIN, stop=["STOP", "print"])
        assert drive(session, tokens) == [(TOOL, call)]
        assert session.finish is FinishReason.STOP_STRING


def test_a_stray_closing_marker_opens_nothing(qwen: Frontend) -> None:
    call = f"{OPEN}</parameter></parameter><parameter=x>{CLOSE}</parameter>{CLOSE}"
    assert drive(qwen.session(PLAIN), qwen.encode(call + "So")) == [(TOOL, call), (CONTENT, "So")]


def test_cost_of_a_token_does_not_grow(qwen: Frontend) -> None:
    """Neither inside a call nor while space is held back."""
    for first, text in ((CALL[:40], "The quick <b>brown</b> fox\n" * 4), ("a", "\n \n" * 25)):
        session, tokens = qwen.session(PLAIN), byte_tokens(qwen, text)
        session.accept(qwen.encode(first))
        times = []
        for _ in range(100):
            start = time.perf_counter()
            for _ in range(10):
                session.accept(tokens)
            times.append(time.perf_counter() - start)
        assert sorted(times[-10:])[2] < 5 * sorted(times[:10])[2]


def test_a_stop_string_does_not_reach_over_a_call(qwen: Frontend) -> None:
    tokens = byte_tokens(qwen, f"ST{CALL}OP")
    assert drive(qwen.session(PLAIN, stop=["STOP"]), tokens) == [
        (CONTENT, "ST"),
        (TOOL, CALL),
        (CONTENT, "OP"),
    ]


def test_a_stop_string_against_the_marker(qwen: Frontend) -> None:
    for stop, expected in (
        (OPEN, [(CONTENT, "a ")]),
        ("a <", []),
        ("call>\n", [(CONTENT, "a"), (TOOL, " " + CALL)]),
    ):
        assert drive(qwen.session(PLAIN, stop=[stop]), qwen.encode("a " + CALL)) == expected


def test_without_tools_or_raw_there_is_no_such_channel(qwen: Frontend) -> None:
    unasked = Prompt([], "", starts_in_thinking=False)
    for session in (qwen.session(unasked), qwen.session(PLAIN, raw=True)):
        assert drive(session, qwen.encode(TEXT)) == [(CONTENT, TEXT)]
    stopped = qwen.session(PLAIN, raw=True, stop=["<function"])
    assert drive(stopped, qwen.encode(TEXT)) == [(CONTENT, TEXT.partition("<function")[0])]


def test_another_family_has_it_too(qwen: Frontend, llama: Frontend) -> None:
    assert drive(llama.session(PLAIN), llama.encode(TEXT)) == drive(qwen.session(PLAIN), qwen.encode(TEXT))


def test_the_prompt_says_whether_tools_are_declared(qwen: Frontend) -> None:
    user = [{"role": "user", "content": "Hi"}]
    assert qwen.render(user, tools=[{"name": "look"}]).declares_tools
    assert not qwen.render(user, tools=[]).declares_tools
    assert not qwen.render(user).declares_tools


def test_a_history_with_the_text_of_a_call_renders_as_text(qwen: Frontend) -> None:
    """Until calls are parsed, a chat keeps them as content."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"Look.\n\n{CALL}"}]
    prompt = qwen.render([*messages, messages[0]])
    assert f"Look.\n\n{CALL}<|im_end|>" in prompt.text
    assert control(qwen, OPEN) not in prompt.tokens
