"""Reading tool calls while they are written: strict ones as the strict parser does, others without loss."""

import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.events import Channel
from ninfer.frontend import Frontend, Prompt
from ninfer.frontend.calls import parse_calls
from ninfer.frontend.toolcalls import (
    CallArguments,
    CallBegan,
    CallEnded,
    CallEvent,
    CallParser,
    CallReport,
    ContentText,
)

SPACE = " \t\r\n"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


FIND = tool(
    "find",
    text={"type": "string"},
    note={"anyOf": [{"type": "string"}, {"type": "null"}]},
    count={"type": "integer"},
    deep={"type": ["object", "array"]},
    sure={"type": "boolean"},
    any={"enum": ["a", 1]},
)
TOOLS = [FIND, tool("look"), tool("dotted.name 2", text={"type": "string"})]


@dataclass
class Read:
    """An answer as its events tell it."""

    content: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    report: CallReport = field(default_factory=CallReport)
    events: list[CallEvent] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    """Content, names, keys and values as they came, for what must not get lost."""


def read(pieces: Iterable[str], tools: Sequence[Any] = TOOLS, channel: Channel = Channel.TOOL) -> Read:
    """Parse, checking what holds of any events."""
    parser = CallParser(tools)
    events = [event for piece in pieces for event in parser.feed(channel, piece)] + parser.close()
    result = Read(report=parser.report)
    open_call: tuple[int, str] | None = None
    pieces_of_call: list[str] = []
    for event in events:
        if isinstance(event, ContentText):
            assert event.text
            assert open_call is None
            result.content += event.text
            result.order.append(event.text)
        elif isinstance(event, CallBegan):
            assert open_call is None
            assert event.index == len(result.calls)
            open_call, pieces_of_call = (event.index, event.name), []
        elif isinstance(event, CallArguments):
            assert open_call is not None
            assert event.index == open_call[0]
            assert event.json_piece.encode()  # or it couldn't be sent
            pieces_of_call.append(event.json_piece)
        else:
            assert open_call == (event.index, event.name)
            assert "".join(pieces_of_call) == event.arguments_json
            arguments = json.loads(event.arguments_json)
            assert isinstance(arguments, dict)
            result.calls.append((event.name, arguments))
            result.order += [event.name, event.arguments_json]
            open_call = None
        result.events = joined(result.events, event)
    assert open_call is None
    assert parser.report.structured_calls == len(result.calls)
    return result


def joined(events: list[CallEvent], event: CallEvent) -> list[CallEvent]:
    last = events[-1] if events else None
    if isinstance(event, ContentText) and isinstance(last, ContentText):
        return [*events[:-1], ContentText(last.text + event.text)]
    if isinstance(event, CallArguments) and isinstance(last, CallArguments):
        return [*events[:-1], CallArguments(event.index, last.json_piece + event.json_piece)]
    return [*events, event]


def call(*parameters: tuple[str, str], name: str = "find") -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


# Properties

FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<function=find>", "<function=look>", "<function=other>",
        "</function>", "<parameter=text>", "<parameter=count>", "<parameter=note>", "<parameter=what>",
        "<parameter=>", "</parameter>", "\n", "\r\n", "\r", " ", "\n\n", "7", '{"a": [1]}', "true", "<", "</",
        "<tool", ">", "=", '{"name": "look"}', '"',
        '<tool_call>\n{"name": "find", "arguments": {"text": "x\\"}"}}\n</tool_call>',
        "\\", "é", "👩‍👩‍👧‍👦", "</param", "{", "}", "</function>\n</tool_call>", "\n</parameter>\n",
        "<tool_call>\n<function=find>\n<parameter=text>\n",
        "<tool_call>\n<function=find>\n<parameter=count>\n",
        "<function", "<parameter",
    ]
)  # fmt: skip


@st.composite
def answers(draw: st.DrawFn) -> str:
    """Anything that looks like calls, with numbered words between, each of them once."""
    parts = draw(st.lists(st.one_of(FRAGMENTS, FRAGMENTS, st.just("word")), max_size=24))
    return "".join(f"w{i}_" if part == "word" else part for i, part in enumerate(parts))


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    points = draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    return [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]


@given(answers(), st.data())
def test_any_chunking_gives_the_same(text: str, data: st.DataObject) -> None:
    whole = read([text])
    assert read(text).events == whole.events
    pieces = data.draw(cut(text))
    chunked = read(pieces)
    assert (chunked.events, chunked.report) == (whole.events, whole.report)


@given(answers())
def test_nothing_that_was_written_gets_lost_or_moves(text: str) -> None:
    def words(of: str) -> list[str]:
        return re.findall(r"w\d+_", of)

    result = read([text])
    assert words(" ".join(result.order)) == words(text)
    if not result.report.marker_seen:
        assert result.content == text
    if not result.calls:
        assert result.content == text


VALUES = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.sampled_from(
        ["", "\n", "\r\n", "\r", "7", " 7 ", "-1.5e3", "True", "null", "[1, 2]", '{"a": {"b": null}}', "NaN"]
    ),
    st.sampled_from(["<parameter=x>1</parameter>", "</tool_call>", "<tool_call>", "</function>", "</par"]),
    st.lists(
        st.sampled_from(
            [
                "a",
                "\n",
                "\r",
                "<parameter=text>b</parameter>",
                "</function>\n</tool_call>\n",
                "<",
                "<tool_call>",
            ]
        )
    ).map("".join),
)
SPACES = st.sampled_from(["", "\n", " \r\n\t"])


@st.composite
def strict_calls(draw: st.DrawFn) -> str:
    space = [draw(SPACES) for _ in range(5)]
    name = draw(st.sampled_from(["find", "find", "look"]))
    keys = draw(
        st.lists(
            st.sampled_from(["text", "note", "count", "deep", "sure", "any", "what"]), max_size=4, unique=True
        )
    )
    body = ""
    for key in keys:
        raw = draw(st.sampled_from(["", "\n", "\r\n"])) + draw(VALUES) + draw(st.sampled_from(["", "\n"]))
        body += f"<parameter={key}>{raw}</parameter>{space[0]}"
    return (
        f"<tool_call>{space[1]}<function={name}>{space[2]}{body}</function>{space[3]}</tool_call>{space[4]}"
    )


@given(
    st.sampled_from(["", "Let me look. ", "Hm <tool_call>?\n", "\n\n"]), st.lists(strict_calls(), min_size=1)
)
def test_strict_calls_are_read_as_by_the_strict_parser(content: str, calls: list[str]) -> None:
    text = content + "".join(calls)
    expected = parse_calls(text, TOOLS)
    assert expected.failure is None
    result = read(text)
    assert result.content == expected.content
    assert tuple(result.calls) == expected.calls
    assert [list(arguments) for _, arguments in result.calls] == [list(a) for _, a in expected.calls]
    assert result.report.schema_mismatches == expected.mismatches
    if "?" not in content:
        assert result.report.fallback == "none"


@given(strict_calls(), st.data())
def test_a_call_cut_short_is_closed(text: str, data: st.DataObject) -> None:
    part = text[: data.draw(st.integers(0, len(text)))]
    result = read(part)
    assert len(result.calls) == ("<function=find>" in part or "<function=look>" in part)
    whole = read([text]).calls[0][1]
    for _, arguments in result.calls:
        for key, value in arguments.items():
            # Only text may be shorter; markers that are cut off may stand at its end.
            complete = f"<parameter={key}>" in part and whole.get(key) == value
            assert complete or (isinstance(value, str) and "<parameter=" in part)


def test_a_session_splits_answers_for_the_parser(qwen: Frontend) -> None:
    text = f"Let me look.\n\n{call(('text', 'a</tool_call>b'))}\n{call(name='look')}\n\nDone."
    session = qwen.session(Prompt([], "", starts_in_thinking=False, declares_tools=True))
    parser = CallParser(TOOLS)
    events: list[CallEvent] = []
    for token in qwen.encode(text):
        for delta in session.push(token).deltas:
            for event in parser.feed(delta.channel, delta.text):
                events = joined(events, event)
    for delta in session.close().deltas:
        for event in parser.feed(delta.channel, delta.text):
            events = joined(events, event)
    for event in parser.close():
        events = joined(events, event)
    assert events == [
        ContentText("Let me look."),
        CallBegan(0, "find"),
        CallArguments(0, '{"text":"a</tool_call>b"}'),
        CallEnded(0, "find", '{"text":"a</tool_call>b"}'),
        CallBegan(1, "look"),
        CallArguments(1, "{}"),
        CallEnded(1, "look", "{}"),
        ContentText("Done."),
    ]
    assert parser.report == CallReport(True, 2, 0, 0, "trailing_content")


def test_content_is_not_searched_where_the_session_found_no_call() -> None:
    result = read(["a ", call()], channel=Channel.CONTENT)
    assert (result.content, result.calls) == ("a " + call(), [])
    assert not result.report.marker_seen


# When things are said


def test_a_call_begins_with_its_name_and_text_streams() -> None:
    parser = CallParser(TOOLS)

    def say(text: str) -> list[CallEvent]:
        return parser.feed(Channel.TOOL, text)

    assert say(" \n<tool_call>\n<function=fi") == []
    assert say("nd>") == [CallBegan(0, "find")]
    assert say("\n<parameter=text") == []
    assert say(">") == [CallArguments(0, '{"text":"')]
    assert say("\n") == []
    assert say('say "hi"\n') == [CallArguments(0, 'say \\"hi\\"')]
    assert say("</") == []
    assert say("b>\r\n") == [CallArguments(0, "\\n</b>")]
    assert say("</parameter") == []
    assert say(">") == [CallArguments(0, '"')]
    assert say("\n<parameter=count>\n1") == []
    assert say("2\n</parameter>") == [CallArguments(0, ',"count":12')]
    end = '{"text":"say \\"hi\\"\\n</b>","count":12}'
    assert say("\n</function>") == [CallArguments(0, "}"), CallEnded(0, "find", end)]
    assert say("\n</tool_call>") == []
    assert parser.close() == []
    assert parser.report == CallReport(True, 1, 0, 0, "none")


def test_json_stays_as_it_was_written_and_empty_parameters_are_left_out() -> None:
    text = call(
        ("deep", '{"b": 1e400,\n "a": [1.0, "\\u00e9"]}'), ("sure", "TRUE"), ("count", ""), ("any", " a ")
    )
    parser = CallParser(TOOLS)
    *_, last = parser.feed(Channel.TOOL, text)
    assert isinstance(last, CallEnded)
    assert last.arguments_json == '{"deep":{"b": 1e400,\n "a": [1.0, "\\u00e9"]},"sure":true,"any":"a"}'
    assert parser.report.empty_arguments_omitted == 1


def test_halves_of_surrogate_pairs_are_no_json_but_text() -> None:
    half = r'{"a": "\ud800"}'
    (call,) = read(
        [f"<tool_call><function=find><parameter=deep>{half}</parameter></function></tool_call>"]
    ).calls
    assert call == ("find", {"deep": half})
    whole = r'{"a": "\ud83d\ude00"}'
    (call,) = read(
        [f"<tool_call><function=find><parameter=any>{whole}</parameter></function></tool_call>"]
    ).calls
    assert call == ("find", {"any": {"a": "\U0001f600"}})
    written = f'<tool_call>{{"name": "find", "arguments": {half}}}</tool_call>'
    assert read([written]).content == written


def test_mismatches_are_counted() -> None:
    result = read([call(("count", "many"), ("what", "7"), ("sure", "1"))])
    assert result.calls == [("find", {"count": "many", "what": 7, "sure": 1})]
    assert result.report == CallReport(True, 1, 0, 3, "none")


# What isn't strictly a call

OPENED = "<tool_call>\n<function=find>\n<parameter=text>\na\n"
FORGIVEN = [
    ("no </function>", OPENED + "</parameter>\n</tool_call>"),
    ("no </tool_call>", OPENED + "</parameter>\n</function>\n"),
    ("no </parameter>", OPENED + "</function>\n</tool_call>\n"),
    ("no closer but the last", OPENED + "</tool_call>"),
    ("nothing behind </function>", OPENED + "</function>"),
    ("quotes around the name", call(("text", "a"), name='"find"')),
    ("space around the name", call(("text", "a"), name=" find ")),
]


@pytest.mark.parametrize("text", [case[1] for case in FORGIVEN], ids=[case[0] for case in FORGIVEN])
def test_slips_with_one_meaning_are_forgiven(text: str) -> None:
    for pieces in ([text], text):
        result = read(pieces)
        assert (result.content, result.calls) == ("", [("find", {"text": "a"})])
        assert result.report.fallback == "none"


def test_closers_inside_a_text_are_text() -> None:
    value = "a\n</function>\n</tool_call>\nb"
    assert read([call(("text", value))]).calls == [("find", {"text": value})]
    # A text that is cut off there could as well have gone on, but then so would the answer.
    cut_off = read([call(("text", value)).partition("\nb")[0]])
    assert cut_off.calls == [("find", {"text": "a"})]


def test_several_calls_without_ends_of_parameters() -> None:
    one, two = call(("text", "a"), ("count", "1")), call(("count", "2"), ("text", "b"))
    for text in (one + two, f"{one}\n{two}\n"):
        for missing in (1, 2, 3, 4):
            drifted = text.replace("\n</parameter>", "", missing)
            for pieces in ([drifted], drifted):
                result = read(pieces)
                assert result.calls == [
                    ("find", {"text": "a", "count": 1}),
                    ("find", {"count": 2, "text": "b"}),
                ]
                assert (result.content, result.report.fallback) == ("", "none")


def test_no_call_begins_inside_of_a_text_that_was_cut_off() -> None:
    inside = f"a\n</function>\n</tool_call>\n{call(('text', 'b'))}\nso"
    result = read([f"<tool_call>\n<function=find>\n<parameter=text>\n{inside}"])
    assert result.calls == [("find", {"text": inside})]


def test_a_parameter_without_an_end_before_the_next_one() -> None:
    text = call(("text", "a"), ("note", "b"), ("count", "3"))
    missing = text.replace("\n</parameter>", "", 2)
    for pieces in ([missing], missing):
        result = read(pieces)
        assert (result.content, result.calls) == ("", [("find", {"text": "a", "note": "b", "count": 3})])
        assert result.report == CallReport(True, 1, 0, 0, "none")
    # But a balanced one is the text's own, declared or not.
    nested = "a\n<parameter=note>\nb\n</parameter>"
    assert read([call(("text", nested))]).calls == [("find", {"text": nested})]
    # One that is given already, or not declared, is text too, even if it isn't closed.
    for key in ("text", "what"):
        inner = f"a\n<parameter={key}>\nb"
        body = call(("text", inner))
        assert read([body]).calls == [("find", {"text": f"{inner}\n</parameter>"})]


def test_names_that_were_declared_count() -> None:
    assert read([call(("text", "a"), name="dotted.name 2")]).calls == [("dotted.name 2", {"text": "a"})]


def test_several_functions_in_one_call() -> None:
    text = "<tool_call>\n<function=look>\n</function>\n<function=find>\n</function>\n</tool_call>"
    assert read([text]).calls == [("look", {}), ("find", {})]
    other = "<tool_call>\n<function=look>\n</function>\n<function=other>\n</function>\n</tool_call>"
    assert read([other]).content == "<function=other>\n</function>\n</tool_call>"


def test_a_call_as_json() -> None:
    arguments = '{"text": "a } \\" </tool_call> {", "deep": {"k": [1, {"x": null}]}}'
    text = f'<tool_call>\n{{"name": "find", "arguments": {arguments}}}\n</tool_call>\n'
    for pieces in ([text * 2], text * 2):
        result = read(pieces)
        assert (result.content, result.calls) == ("", [("find", json.loads(arguments))] * 2)
        assert result.report.fallback == "none"
    assert read(['<tool_call>{"name": "look"}</tool_call>']).calls == [("look", {})]


@pytest.mark.parametrize(
    ("body", "fallback"),
    [
        ('{"name": "other", "arguments": {}}', "undeclared_tool"),
        ('{"name": "find", "arguments": {}, "more": 1}', "malformed_structure"),
        ('{"name": "find", "arguments": [1]}', "malformed_structure"),
        ('{"name": "find", "arguments": {"a": 1, "a": 2}}', "malformed_structure"),
        ('{"name": "find", "arguments": {"a": 1e999}}', "malformed_structure"),
        ('{"name": "find", "arguments": {"a": NaN}}', "malformed_structure"),
        ('{"name": 1}', "malformed_structure"),
        ("{find}", "malformed_structure"),
        ('{"a": ' * 5000 + "}" * 5000, "malformed_structure"),
    ],
)
def test_json_that_is_no_call_is_content(body: str, fallback: str) -> None:
    text = f"Hm.\n<tool_call>\n{body}\n</tool_call>\n"
    result = read([text])
    assert (result.content, result.calls, result.report.fallback) == (text, [], fallback)


MALFORMED = [
    (call(("a", "<tool_call>"), name="other"), "undeclared_tool"),
    (call(name="fi+nd"), "invalid_tool_name"),
    (call(name=""), "invalid_tool_name"),
    ("<tool_call>\n<function=" + "f" * 300, "invalid_tool_name"),
    ("<tool_call>\nfind\n</tool_call>", "malformed_structure"),
    ("<tool_call>\n<function=find", "malformed_structure"),
    ("<tool_call> \n", "malformed_structure"),
    ('<tool_call>{"name": "find"', "malformed_structure"),
    ("<tool_call>", "malformed_structure"),
    ("<tool_call></tool_call>", "malformed_structure"),
    ("<tool_c", "none"),
]


@pytest.mark.parametrize(("text", "fallback"), MALFORMED)
def test_what_never_became_a_call_is_content(text: str, fallback: str) -> None:
    for before in ("", "Let me look.\n\n"):
        for pieces in ([before + text], before + text):
            result = read(pieces)
            assert (result.content, result.calls, result.report.fallback) == (before + text, [], fallback)


def test_a_call_may_follow_what_was_none() -> None:
    for text in (call(name="other"), "<tool_call>\n", "<tool_call> is a marker"):
        result = read([f"{text}\n{call(('text', 'a'))}"])
        assert result.calls == [("find", {"text": "a"})]
        assert result.content == text.rstrip()
        assert result.report.fallback != "none"


END = "</function>\n</tool_call>"
BROKEN = [
    ("stray text", "hm\n<parameter=count>\n3\n</parameter>\n" + END, "malformed_structure"),
    ("a key twice", "<parameter=text>\n<tool_call>\n</parameter>\n" + END, "duplicate_parameter"),
    ("an empty key", "<parameter=>\nb\n</parameter>\n" + END, "malformed_structure"),
    ("an endless key", "<parameter=" + "k" * 2000, "malformed_structure"),
    ("a second closer", "</parameter>\n" + END, "malformed_structure"),
    ("text behind the function", "hm\n</tool_call>", "malformed_structure"),
]


@pytest.mark.parametrize(("rest", "fallback"), [c[1:] for c in BROKEN], ids=[c[0] for c in BROKEN])
def test_a_call_that_breaks_is_closed_and_the_rest_is_content(rest: str, fallback: str) -> None:
    text = f"Look.\n{OPENED}</parameter>\n" + "</function>\n" * rest.endswith("hm\n</tool_call>") + rest
    for pieces in ([text], text):
        result = read(pieces)
        assert result.calls == [("find", {"text": "a"})]
        assert (result.content, result.report.fallback) == ("Look." + rest, fallback)
    again = read([text, "\n", call(("count", "4"))])
    if text.endswith("</tool_call>"):
        assert again.calls == [("find", {"text": "a"}), ("find", {"count": 4})]


@pytest.mark.parametrize(
    ("end", "arguments", "content"),
    [
        ("", {}, ""),
        ("<param", {}, "<param"),
        ("<parameter=te", {}, "<parameter=te"),
        ("<parameter=text>", {"text": ""}, ""),
        ("<parameter=text>\nab\n", {"text": "ab\n"}, ""),
        ("<parameter=text>\nab\n</param", {"text": "ab\n</param"}, ""),
        ("<parameter=text>\nab\n</function>\n</tool", {"text": "ab\n</function>\n</tool"}, ""),
        ("<parameter=text>\nab <parameter=note>\nc", {"text": "ab <parameter=note>\nc"}, ""),
        ("<parameter=count>\n12", {}, "<parameter=count>\n12"),
        ("<parameter=count>\n12\n</function>", {"count": 12}, ""),
        ("<parameter=count>\n12\n</parameter>", {"count": 12}, ""),
        ("<parameter=deep>\n[1, 2\n</par", {}, "<parameter=deep>\n[1, 2\n</par"),
    ],
)
def test_an_answer_that_ends_inside_a_call(end: str, arguments: dict[str, Any], content: str) -> None:
    result = read(["<tool_call>\n<function=find>\n" + end])
    assert result.calls == [("find", arguments)]
    assert result.content == content
    assert (result.report.fallback == "none") is end.endswith("</function>")


def test_space_around_calls_is_dropped_and_other_space_is_kept() -> None:
    result = read([f" a \n\n{call()} \n\t{call()}\r\n b \n"])
    assert result.content == " ab \n"
    assert [type(event) for event in result.events if isinstance(event, ContentText | CallBegan)] == [
        ContentText, CallBegan, CallBegan, ContentText,
    ]  # fmt: skip
    assert read(["a \n <tool_call>\n "]).content == "a \n <tool_call>\n "
    assert read([" \n"]).content == " \n"


def test_without_tools_everything_is_content() -> None:
    assert read([call()], tools=[]).content == call()


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=find>\n<parameter=text>\n" + "a <b> \n" * 30_000,
        "<tool_call>\n<function=find>\n<parameter=deep>\n" + '{"a": "<b>"},' * 20_000,
        "<tool_call>\n<function=find>\n<parameter=text>\n</function>" + "\n" * 200_000,
        "<tool_call>\n<function=find>\n<parameter=text>\n<parameter=note>" + "\n<" * 100_000,
        "<tool_call>\n<function=find>\n" + "\n" * 200_000,
        "<tool_call>" + "\n" * 200_000,
        "a" + "\n" * 200_000,
        '<tool_call>{"name": "' + 'x\\" ' * 50_000,
        "<tool_call>" * 20_000,
        "<tool_call><function=find><parameter=text>a</function></tool_call>" * 3_000,
        "<tool_call><function=find><parameter=text><parameter=note><parameter=any></function></tool_call>"
        * 2_000,
        "<tool_call><function=find><parameter=" + "k" * 200_000,
        call() * 2_000,
    ],
    ids=[
        "text",
        "json",
        "newlines",
        "doubt",
        "between",
        "opened",
        "content",
        "hermes",
        "markers",
        "open",
        "doubts",
        "key",
        "calls",
    ],
)
def test_time_is_linear(text: str) -> None:
    """In pieces of four characters; a quadratic step would take minutes."""
    parser = CallParser(TOOLS)
    start = time.perf_counter()
    for at in range(0, len(text), 4):
        parser.feed(Channel.TOOL, text[at : at + 4])
    parser.close()
    assert time.perf_counter() - start < 5
