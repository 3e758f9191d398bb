"""Masks: what a grammar allows, through drafts and thinking blocks, and what a session reports to it."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from ninfer.errors import FrontendError, GrammarError
from ninfer.events import Channel, FinishReason
from ninfer.frontend import Frontend, OutputSession, Prompt
from ninfer.frontend.constraint import Script

PLAIN = Prompt([], "", starts_in_thinking=False)
THINKING = Prompt([], "", starts_in_thinking=True)
TOOLS = Prompt([], "", starts_in_thinking=False, declares_tools=True)
WORDS = 40
"""More than the tokenizers of the tests need: the rest must come out as zeros."""


def masks_of(session: OutputSession, drafts: Sequence[int] = ()) -> list[set[int]]:
    """The tokens allowed in each valid row."""
    masks = np.full((1 + len(drafts), WORDS), 0x55555555, np.int32)
    rows = session.fill_masks(drafts, masks)
    assert (masks[rows:] == 0x55555555).all()
    bits = np.unpackbits(masks[:rows].view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def allowed_texts(frontend: Frontend, session: OutputSession) -> set[bytes]:
    (row,) = masks_of(session)
    return {frontend.token_bytes(token) for token in row}


def control(frontend: Frontend, content: str) -> int:
    token = frontend._tokenizer.control_id(content)
    assert token is not None
    return token


def follow(session: OutputSession, tokens: Iterable[int]) -> None:
    """Every token must be allowed by the masks."""
    for token in tokens:
        assert token in masks_of(session)[0]
        session.push(token)


def test_only_what_the_grammar_allows_then_a_stop(qwen: Frontend) -> None:
    session = qwen.session(PLAIN, grammar='start: "yes" | "no"')
    assert session.constrained
    assert {t[:1] for t in allowed_texts(qwen, session)} == {b"y", b"n"}
    follow(session, qwen.encode("no"))
    assert masks_of(session) == [set(qwen.stop_token_ids)]
    session.push(qwen.stop_token_ids[1])
    assert session.finish is FinishReason.STOP_TOKEN
    assert not qwen.session(PLAIN).constrained


def test_text_of_any_kind_but_no_hidden_token(qwen: Frontend) -> None:
    (row,) = masks_of(qwen.session(PLAIN, grammar="start: /(.|\\n)*/"))
    hidden = {i for i in range(qwen.public_tokens) if qwen._tokenizer.is_special(i)}
    assert row & hidden == set(qwen.stop_token_ids)
    assert {control(qwen, "<tool_call>"), control(qwen, "</think>"), *qwen.encode("é\n")} <= row


def test_an_additional_stop_token_ends_a_satisfied_grammar(qwen: Frontend) -> None:
    hidden = control(qwen, "<|vision_pad|>")
    session = qwen.session(PLAIN, grammar='start: "a" "b"?', stop_token_ids=[hidden])
    assert hidden not in masks_of(session)[0]
    follow(session, qwen.encode("a"))
    assert masks_of(session) == [{hidden, *qwen.stop_token_ids, *qwen.encode("b")}]
    session.push(hidden)
    assert session.finish is FinishReason.STOP_TOKEN


def test_masks_after_drafts(qwen: Frontend) -> None:
    a, b, c = (qwen.encode(letter)[0] for letter in "abc")
    end = qwen.stop_token_ids[0]
    session = qwen.session(PLAIN, grammar='start: "a" ("b" | "c") "c"')
    for _ in range(2):  # nothing is changed by it
        assert masks_of(session, [a, b, c]) == [{a}, {b, c}, {c}, set(qwen.stop_token_ids)]
        assert masks_of(session, [a, a, c]) == [{a}, {b, c}]
        assert masks_of(session, [b]) == [{a}]
        assert masks_of(session, [a, c, c, end, a]) == [{a}, {b, c}, {c}, set(qwen.stop_token_ids)]
    session.accept([a, c])
    assert masks_of(session, [c]) == [{c}, set(qwen.stop_token_ids)]


def test_thinking_is_free_and_the_answer_is_not(qwen: Frontend) -> None:
    a, b = (qwen.encode(letter)[0] for letter in "ab")
    close, stop = control(qwen, "</think>"), qwen.stop_token_ids[0]
    session = qwen.session(THINKING, grammar='start: "ab"')
    assert session.constrained
    thoughts = set(range(32 * WORDS)).difference(qwen.stop_token_ids)  # as something must follow
    assert masks_of(session) == [thoughts]
    assert masks_of(session, [a, b]) == [thoughts] * 3
    assert masks_of(session, [a, stop, b]) == [thoughts] * 2
    assert masks_of(session, [b, close, a]) == [thoughts, thoughts, {a}, {b}]
    assert masks_of(session, [b, close, b]) == [thoughts, thoughts, {a}]
    session.accept([b, close])
    follow(session, [a, b])
    assert masks_of(session) == [set(qwen.stop_token_ids)]


def test_an_answer_that_may_be_empty_may_end_in_thinking(qwen: Frontend) -> None:
    a, b = (qwen.encode(letter)[0] for letter in "ab")
    close, stop = control(qwen, "</think>"), qwen.stop_token_ids[0]
    session = qwen.session(THINKING, grammar='start: "ab"?')
    assert masks_of(session) == masks_of(session, [a, b]) == masks_of(session, [a, stop]) == []
    everything = set(range(32 * WORDS))
    behind = {a, *qwen.stop_token_ids}
    assert masks_of(session, [b, close, a]) == [everything, everything, behind, {b}]
    session.accept([b, close])
    assert masks_of(session) == [behind]


def test_a_marker_spelled_in_pieces_ends_thinking_too(qwen: Frontend) -> None:
    a = qwen.encode("a")[0]
    pieces = qwen.encode("</think>")
    assert len(pieces) > 1
    session = qwen.session(THINKING, grammar='start: "ab"')
    assert masks_of(session, [*pieces, a])[-2:] == [{a}, set(qwen.encode("b"))]
    session.accept(pieces[:1])
    assert len(masks_of(session, pieces[1:])) == len(pieces)
    session.accept(pieces[1:])
    assert masks_of(session) == [{a}]


def test_what_the_closing_token_says_behind_the_marker_counts(qwen: Frontend) -> None:
    session = qwen.session(THINKING, grammar='start: "ab"')
    session._route("thought</think>\n\na")  # no tokenizer here has such a token
    session._follow(0, thought=True)
    assert masks_of(session) == [set(qwen.encode("b"))]


def test_the_forced_end_of_thinking(qwen: Frontend) -> None:
    session = qwen.session(THINKING, grammar='start: "ab"', thinking_budget=1)
    session.push(qwen.encode("b")[0])
    assert session.closer_due
    session.commit_closer()
    assert masks_of(session) == [set(qwen.encode("a"))]


def test_what_is_forced_is_written_as_a_model_writes_it(qwen: Frontend) -> None:
    session = qwen.session(TOOLS, grammar='start: "<tool_call>\\n<function=" "x"')
    follow(session, [control(qwen, "<tool_call>"), *qwen.encode("\n<function=x")])
    decomposed = "e\u0301"  # which the normalizer of Qwen would make one character
    session = qwen.session(PLAIN, grammar=f'start: "{decomposed}"')
    seen = b""
    while not masks_of(session)[0] & set(qwen.stop_token_ids):
        token = min(masks_of(session)[0])
        seen += qwen.token_bytes(token)
        session.push(token)
    assert seen == decomposed.encode()


def test_forced_text_never_becomes_a_hidden_token(qwen: Frontend) -> None:
    session = qwen.session(PLAIN, grammar='start: "<|im_end|>"')
    follow(session, qwen.encode("<|im_end|>"))
    assert session.finish is None


def test_a_grammar_that_cannot_be_used(qwen: Frontend) -> None:
    with pytest.raises(GrammarError, match=r"^The grammar can't be used: .*[^.]\.$"):
        qwen.session(PLAIN, grammar="start: nothing_here")
    with pytest.raises(FrontendError, match="stop tokens"):
        qwen.session(PLAIN, grammar='start: "a"', ignore_model_stops=True)
    with pytest.raises(FrontendError, match="exclude each other"):
        qwen.session(PLAIN, grammar='start: "a"', constraint=Script([], [0]))


def test_a_grammar_that_becomes_too_complex_is_an_error(qwen: Frontend) -> None:
    session = qwen.session(PLAIN, grammar='start: "a"')
    session._constraint._matcher.consume_token(qwen.encode("b")[0])  # pyright: ignore
    with pytest.raises(GrammarError, match="can't go on by its grammar") as raised:
        masks_of(session)
    assert "\n" not in str(raised.value)
    assert '"b"' not in str(raised.value)


def test_a_script_forces_an_answer(qwen: Frontend) -> None:
    tokens = qwen.encode("Hello")
    assert len(tokens) > 2
    stops = set(qwen.stop_token_ids)
    session = qwen.session(PLAIN, constraint=Script(tokens, stops))
    assert masks_of(session, tokens) == [*({t} for t in tokens), stops]
    assert masks_of(session, [tokens[0], tokens[0]]) == [{tokens[0]}, {tokens[1]}]
    follow(session, tokens)
    assert masks_of(session, [1]) == [stops]
    assert not Script(tokens, stops).accept(tokens[1])


def test_a_single_call_ends_the_answer(qwen: Frontend) -> None:
    call = "<tool_call>\n<function=f>\n<parameter=a>\n</tool_call>\n</parameter>\n</function>\n</tool_call>"
    tokens = qwen.encode("Look.\n" + call + "\n\nSo")
    session = qwen.session(TOOLS, single_call=True)
    step = session.accept(tokens)
    assert "".join(d.text for d in step.deltas) == "Look.\n" + call
    assert step.deltas[-1].channel is Channel.TOOL
    assert session.finish is FinishReason.STOP_TOKEN
    assert step.committed == len(qwen.encode("Look.\n" + call))


def test_content_tokens_are_those_of_the_answer(qwen: Frontend) -> None:
    close, call, end = (control(qwen, text) for text in ("</think>", "<tool_call>", "</tool_call>"))
    space, word = qwen.encode("\n\n"), qwen.encode("a")
    hidden = control(qwen, "<|vision_pad|>")
    prompt = Prompt([], "", starts_in_thinking=True, declares_tools=True)
    tokens = [*word, close, *space, *word, hidden, *word, call, *word, end, *word, qwen.stop_token_ids[0]]
    session = qwen.session(prompt)
    step = session.accept(tokens)
    first = 2 + len(space)
    assert step.content_tokens == (first, first + 2, first + 6)
    raw = qwen.session(prompt, raw=True).accept(tokens)
    assert raw.content_tokens == tuple(range(len(tokens) - 1))
    stopped = qwen.session(PLAIN, stop=["b"]).accept(qwen.encode("a") + qwen.encode("b"))
    assert stopped.content_tokens == (0,)


def test_the_stop_string_is_named(qwen: Frontend) -> None:
    session = qwen.session(THINKING, stop=["x", "STOP"], reasoning_stop=["END"])
    session.accept(qwen.encode("a</think>STOP"))
    assert session.stop_string == "STOP"
    thinking = qwen.session(THINKING, stop=["x", "STOP"], reasoning_stop=["END"])
    thinking.accept(qwen.encode("STOP END"))
    assert thinking.stop_string == "END"
    plain = qwen.session(PLAIN, stop=["x"])
    plain.push(qwen.stop_token_ids[0])
    assert plain.stop_string is None
