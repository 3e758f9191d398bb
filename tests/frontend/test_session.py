"""Output sessions: channels, stops, hidden tokens, whole characters, budgets."""

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.errors import FrontendError
from ninfer.events import Channel, Delta, FinishReason, Step
from ninfer.frontend import Frontend, OutputSession, Prompt
from ninfer.frontend.thinking import EARLY_CLOSE

PLAIN = Prompt([], "", starts_in_thinking=False)
THINKING = Prompt([], "", starts_in_thinking=True)
VALID = st.text(st.characters(codec="utf-8"), max_size=40)
TRICKY = st.one_of(
    VALID,
    st.sampled_from(
        ["👩‍👩‍👧‍👦", "e\u0301", "漢字", "שלום", "🇩🇪", "</think>", "</thi", "<", "STOP", "ST", "\n\n"]
    ),
)


def drive(session: OutputSession, tokens: Iterable[int]) -> tuple[str, str, FinishReason | None, list[Step]]:
    """Reasoning, content, finish reason and all steps of a session that is fed one token at a time."""
    steps = []
    for token in tokens:
        steps.append(session.push(token))
        if session.finish is not None:
            break
    steps.append(session.close())
    texts = {
        channel: "".join(d.text for s in steps for d in s.deltas if d.channel is channel)
        for channel in Channel
    }
    return texts[Channel.REASONING], texts[Channel.CONTENT], session.finish, steps


def control(frontend: Frontend, content: str) -> int:
    token = frontend._tokenizer.control_id(content)
    assert token is not None
    return token


def byte_tokens(frontend: Frontend, text: str) -> list[int]:
    """One token for each byte: every split inside characters happens."""
    return [_byte_token(frontend, b) for b in text.encode()]


def _byte_token(frontend: Frontend, byte: int) -> int:
    for token in range(frontend.public_tokens):
        if frontend._tokenizer.token_bytes(token) == bytes([byte]):
            return token
    raise AssertionError(byte)


def stream(frontend: Frontend, parts: Sequence[str], bytewise: Sequence[bool]) -> list[int]:
    tokens: list[int] = []
    for part, split in zip(parts, bytewise, strict=True):
        tokens += byte_tokens(frontend, part) if split else frontend.encode(part)
    return tokens


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[str], list[bool]]:
    parts = draw(st.lists(TRICKY, max_size=8))
    return parts, [draw(st.booleans()) for _ in parts]


@given(st.lists(st.integers(0, 10_000), max_size=60))
def test_deltas_join_to_the_full_decode(qwen: Frontend, numbers: list[int]) -> None:
    """Any token sequence, ill-formed bytes included, published piece by piece equals decoding it at once."""
    tokens = [n % qwen.public_tokens for n in numbers]
    session = qwen.session(PLAIN, ignore_model_stops=True)
    reasoning, content, finish, steps = drive(session, tokens)
    assert (reasoning, content, finish) == ("", qwen.decode(tokens), None)
    assert sum(step.committed for step in steps) == len(tokens)
    raw = qwen.session(PLAIN, ignore_model_stops=True, raw=True)
    assert drive(raw, tokens)[1] == qwen.decode(tokens, keep_special=True)


@given(texts())
def test_no_delta_holds_a_part_of_a_character(qwen: Frontend, drawn: tuple[list[str], list[bool]]) -> None:
    tokens = stream(qwen, *drawn)
    for step in drive(qwen.session(PLAIN), tokens)[3]:
        for delta in step.deltas:
            assert delta.text
            assert "\ufffd" not in delta.text or any("\ufffd" in part for part in drawn[0])
            delta.text.encode()


@given(texts(), st.booleans())
def test_channels_split_at_the_marker(qwen: Frontend, drawn: tuple[list[str], list[bool]], raw: bool) -> None:
    tokens = stream(qwen, *drawn)
    text = qwen.decode(tokens)
    reasoning, content, finish, steps = drive(qwen.session(THINKING, raw=raw), tokens)
    before, marker, after = text.partition("</think>")
    assert finish is None
    if raw:
        assert (reasoning, content) == ("", text)
    else:
        assert reasoning == before
        assert content == (after.lstrip(" \t\r\n") if marker else "")
    for step in steps:
        assert all(a.channel is not b.channel for a, b in pairwise(step.deltas))


@given(texts(), st.lists(st.sampled_from(["STOP", "S", "é", "👩", "</", "\n", "OPS", "a"]), max_size=3))
def test_stop_strings_at_any_boundary(
    qwen: Frontend, drawn: tuple[list[str], list[bool]], stops: list[str]
) -> None:
    tokens = stream(qwen, *drawn)
    session = qwen.session(PLAIN, stop=stops)
    _, content, finish, steps = drive(session, tokens)
    expected = None
    for count in range(1, len(tokens) + 1):
        whole = b"".join(map(qwen._tokenizer.token_bytes, tokens[:count]))
        seen = whole.decode("utf-8", "ignore")
        begins = [seen.find(stop) for stop in stops if stop in seen]
        if begins:
            expected = count, seen[: min(begins)]
            break
    if expected is None:
        assert (finish, content) == (None, qwen.decode(tokens))
    else:
        assert finish is FinishReason.STOP_STRING
        assert (sum(step.committed for step in steps), content) == expected


@given(texts(), st.data())
def test_rounds_publish_what_single_tokens_publish(
    qwen: Frontend, drawn: tuple[list[str], list[bool]], data: st.DataObject
) -> None:
    tokens = stream(qwen, *drawn)
    one = qwen.session(THINKING, stop=["STOP"], reasoning_stop=["ST"])
    single = drive(one, tokens)
    session = qwen.session(THINKING, stop=["STOP"], reasoning_stop=["ST"])
    deltas: list[Delta] = []
    committed, cursor = 0, 0
    while cursor < len(tokens) and session.finish is None:
        size = data.draw(st.integers(1, 5))
        step = session.accept(tokens[cursor : cursor + size])
        deltas += step.deltas
        committed += step.committed
        cursor += size
    deltas += session.close().deltas
    got = {c: "".join(d.text for d in deltas if d.channel is c) for c in Channel}
    assert (got[Channel.REASONING], got[Channel.CONTENT], session.finish) == single[:3]
    assert committed == sum(step.committed for step in single[3])
    assert session.reasoning_tokens == one.reasoning_tokens


def test_stop_token_is_committed_and_silent(qwen: Frontend) -> None:
    end = qwen.stop_token_ids[0]
    session = qwen.session(PLAIN)
    step = session.accept([*qwen.encode("Hi"), end, *qwen.encode("never")])
    said = len(qwen.encode("Hi"))
    assert step == Step(
        (Delta(Channel.CONTENT, "Hi"),), FinishReason.STOP_TOKEN, said + 1, tuple(range(said))
    )
    assert session.close() == Step((), FinishReason.STOP_TOKEN, 0)
    with pytest.raises(RuntimeError):
        session.push(end)


def test_stop_token_releases_what_was_held(qwen: Frontend) -> None:
    session = qwen.session(PLAIN, stop=["STOP!"])
    assert session.accept(qwen.encode("a ST")).deltas == (Delta(Channel.CONTENT, "a "),)
    session.push(byte_tokens(qwen, "é")[0])
    step = session.push(qwen.stop_token_ids[1])
    assert step.deltas == (Delta(Channel.CONTENT, "ST\ufffd"),)


def test_stop_token_choices(qwen: Frontend) -> None:
    end, (letter,) = qwen.stop_token_ids[0], qwen.encode("a")
    assert qwen.session(PLAIN, ignore_model_stops=True).push(end).finish is None
    assert qwen.session(PLAIN, stop_token_ids=[letter]).push(letter).finish is FinishReason.STOP_TOKEN
    only = qwen.session(PLAIN, stop_token_ids=[letter], ignore_model_stops=True)
    assert only.push(end).finish is None
    assert only.push(letter).finish is FinishReason.STOP_TOKEN
    raw = qwen.session(PLAIN, raw=True)
    assert raw.push(end) == Step((), FinishReason.STOP_TOKEN, 1)


def test_special_tokens_are_hidden_unless_raw(qwen: Frontend) -> None:
    tokens = [
        *qwen.encode("a"),
        control(qwen, "<|im_start|>"),
        control(qwen, "<tool_call>"),
        *qwen.encode("b"),
    ]
    assert drive(qwen.session(PLAIN), tokens)[1] == "a<tool_call>b"
    assert drive(qwen.session(PLAIN, raw=True), tokens)[1] == "a<|im_start|><tool_call>b"


def test_marker_as_a_token(qwen: Frontend) -> None:
    tokens = [*qwen.encode("why\n"), control(qwen, "</think>"), *qwen.encode("\n\n  Yes.\n")]
    session = qwen.session(THINKING)
    reasoning, content, _, _ = drive(session, tokens)
    assert (reasoning, content) == ("why\n", "Yes.\n")
    assert session.reasoning_tokens == session.thinking_model_tokens == len(qwen.encode("why\n")) + 1


def test_only_space_after_the_marker(qwen: Frontend) -> None:
    tokens = [control(qwen, "</think>"), *qwen.encode("\n\n")]
    assert drive(qwen.session(THINKING), tokens)[:2] == ("", "")
    assert drive(qwen.session(THINKING, raw=True), tokens)[1] == "</think>\n\n"


def test_no_split_when_the_prompt_does_not_start_in_thinking(qwen: Frontend) -> None:
    tokens = [*qwen.encode("a"), control(qwen, "</think>"), *qwen.encode("\n\nb")]
    session = qwen.session(PLAIN)
    assert drive(session, tokens)[:2] == ("", "a</think>\n\nb")
    assert session.reasoning_tokens == 0


def test_stops_belong_to_their_channel(qwen: Frontend) -> None:
    tokens = [*qwen.encode("x END y CUT z"), control(qwen, "</think>"), *qwen.encode("p CUT q END r")]
    assert drive(qwen.session(THINKING, stop=["END"]), tokens)[:3] == (
        "x END y CUT z", "p CUT q ", FinishReason.STOP_STRING,
    )  # fmt: skip
    assert drive(qwen.session(THINKING, reasoning_stop=["CUT"]), tokens)[:3] == (
        "x END y ", "", FinishReason.STOP_STRING,
    )  # fmt: skip
    assert drive(qwen.session(THINKING, stop=["zzz"], reasoning_stop=["END"]), tokens)[:2] == ("x ", "")


def test_content_stop_does_not_see_the_stripped_space(qwen: Frontend) -> None:
    tokens = [control(qwen, "</think>"), *qwen.encode("\n\none\n\ntwo")]
    assert drive(qwen.session(THINKING, stop=["\n\n"]), tokens)[:3] == ("", "one", FinishReason.STOP_STRING)


@pytest.mark.parametrize(
    ("stops", "content"),
    [(["cd", "bc"], "a"), (["bcd", "bc"], "a"), (["d", "cd", "abcdX"], "ab"), (["x", "abcd"], "")],
)
def test_earliest_character_wins_within_a_token(qwen: Frontend, stops: list[str], content: str) -> None:
    """A token whose text holds several stops: the one that begins first decides."""
    session = qwen.session(PLAIN, stop=stops)
    session._route("abcd")
    step = session.close()
    assert "".join(d.text for d in step.deltas) == content
    assert session.finish is FinishReason.STOP_STRING


@pytest.mark.parametrize(
    ("reasoning_stop", "expected"),
    [
        ("</think>", ("why", "", FinishReason.STOP_STRING)),
        ("y</th", ("wh", "", FinishReason.STOP_STRING)),
        ("ink>\n", ("why", "because", None)),
        ("bec", ("why", "because", None)),
    ],
)
def test_reasoning_stop_against_the_marker(
    qwen: Frontend, reasoning_stop: str, expected: tuple[str, str, FinishReason | None]
) -> None:
    for tokens in (qwen.encode("why</think>\nbecause"), byte_tokens(qwen, "why</think>\nbecause")):
        assert drive(qwen.session(THINKING, reasoning_stop=[reasoning_stop]), tokens)[:3] == expected


def test_close_completes_a_character_with_a_replacement(qwen: Frontend) -> None:
    session = qwen.session(PLAIN)
    for token in byte_tokens(qwen, "👍")[:3]:
        assert session.push(token).deltas == ()
    assert session.close() == Step((Delta(Channel.CONTENT, "\ufffd"),), None, 0)
    assert session.close() == Step((), None, 0)


def test_ill_formed_bytes_by_maximal_subparts(qwen: Frontend) -> None:
    data = b"a\xf0\x9f\x98z\xc3\x28\xed\xa0\x80\xff"
    tokens = [_byte_token(qwen, b) for b in data]
    assert drive(qwen.session(PLAIN), tokens)[1] == data.decode("utf-8", "replace")
    assert data.decode("utf-8", "replace") == "a\ufffdz\ufffd(\ufffd\ufffd\ufffd\ufffd"


def test_thinking_budget(qwen: Frontend) -> None:
    session = qwen.session(THINKING, thinking_budget=3)
    tokens = qwen.encode("I wonder about this")
    assert session.thinking_remaining == 3
    session.accept(tokens[:2])
    assert (session.thinking_remaining, session.closer_due) == (1, False)
    session.push(tokens[2])
    assert (session.thinking_remaining, session.closer_due) == (0, True)
    assert qwen.decode(session.closer) == EARLY_CLOSE
    assert control(qwen, "</think>") in session.closer
    step = session.commit_closer()
    assert step.committed == len(session.closer)
    assert step.deltas == (Delta(Channel.REASONING, EARLY_CLOSE.split("</think>")[0]),)
    assert not session.closer_due
    assert session.thinking_remaining is None
    after = session.accept(qwen.encode("\nSo: yes"))
    assert after.deltas == (Delta(Channel.CONTENT, "So: yes"),)
    assert session.thinking_model_tokens == 3
    assert session.control_tokens == len(session.closer)
    assert session.reasoning_tokens == 3 + session.closer.index(control(qwen, "</think>")) + 1


def test_budget_text_is_exact() -> None:
    assert EARLY_CLOSE == (
        "\n\n Considering the limited time by the user, I have to give the solution based on the thinking "
        "directly now.\n</think>\n\n"
    )


def test_closer_is_not_searched_for_stops_and_releases_held_text(qwen: Frontend) -> None:
    session = qwen.session(THINKING, thinking_budget=99, reasoning_stop=["Considering", "</think>", "zzz!"])
    assert session.accept(qwen.encode("hm zzz")).deltas == (Delta(Channel.REASONING, "hm "),)
    session.push(byte_tokens(qwen, "é")[0])
    step = session.commit_closer()
    assert step.finish is None
    assert step.deltas[0].text.startswith("zzz\ufffd\n\n Considering")


def test_natural_close_ends_the_budget(qwen: Frontend) -> None:
    session = qwen.session(THINKING, thinking_budget=2)
    session.accept([*qwen.encode("a"), control(qwen, "</think>")])
    assert (session.thinking_remaining, session.closer_due) == (None, False)
    stopped = qwen.session(THINKING, thinking_budget=1)
    stopped.push(qwen.stop_token_ids[0])
    assert not stopped.closer_due


def test_budget_without_thinking_has_no_effect(qwen: Frontend) -> None:
    session = qwen.session(PLAIN, thinking_budget=1)
    session.accept(qwen.encode("many words are fine"))
    assert (session.thinking_remaining, session.closer_due) == (None, False)
    with pytest.raises(RuntimeError):
        session.commit_closer()


def test_raw_budget_publishes_everything_as_content(qwen: Frontend) -> None:
    session = qwen.session(THINKING, thinking_budget=1, raw=True)
    session.push(qwen.encode("a")[0])
    assert session.commit_closer().deltas == (Delta(Channel.CONTENT, EARLY_CLOSE),)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stop": [""]}, "Every stop string"),
        ({"stop": "text"}, "Every stop string"),
        ({"reasoning_stop": [b"x"]}, "Every reasoning stop string"),
        ({"stop_token_ids": [-1]}, "stop token id -1"),
        ({"stop_token_ids": [2**31]}, "no integer in 0..2147483647"),
        ({"stop_token_ids": ["2"]}, "stop token id '2' is no integer"),
        ({"thinking_budget": 0}, "at least 1 token, not 0"),
    ],
)
def test_options_are_checked(qwen: Frontend, options: dict, words: str) -> None:
    with pytest.raises(FrontendError, match=words):
        qwen.session(THINKING, **options)


def test_ids_outside_the_domain(qwen: Frontend) -> None:
    with pytest.raises(FrontendError, match="outside the tokenizer's"):
        qwen.session(PLAIN).push(qwen.public_tokens)


def test_cost_of_a_token_does_not_grow(qwen: Frontend) -> None:
    """The last tokens of a long answer cost about what the first cost."""
    tokens = qwen.encode("The quick brown fox jumps over the lazy dog. ")
    session = qwen.session(THINKING, stop=["STOP"], reasoning_stop=["The quick brown fox jumped", "lazy cat"])
    times = []
    for _ in range(40):
        start = time.perf_counter()
        for _ in range(20):
            session.accept(tokens)
        times.append(time.perf_counter() - start)
    assert sorted(times[-10:])[2] < 5 * sorted(times[:10])[2]
