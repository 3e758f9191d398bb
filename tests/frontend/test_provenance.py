"""Every string operation gives what `str` gives, and its spans are exactly the template's characters.

Template characters are taken from one alphabet and data from another, so that the oracle for the spans of any
result is a look at its characters.
"""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.frontend.interpolation import percent_text
from ninfer.frontend.provenance import TemplateText, concatenate, spans_of

TEMPLATE = "AB<| \n"
DATA = "ab>|\t"  # '|' is in both: operations may search for it, spans are checked without it


def mixed() -> st.SearchStrategy[str]:
    part = st.one_of(st.text(TEMPLATE).map(TemplateText.literal), st.text(DATA))
    return st.lists(part, max_size=6).map(concatenate)


def check(result: str, expected: str) -> None:
    """`result` has the characters of `expected`, and every marked character is the template's."""
    assert str.__str__(result) == expected
    marked = {i for begin, end in spans_of(result) for i in range(begin, end)}
    for i, character in enumerate(expected):
        if character in "AB<":
            assert i in marked, "template text was lost"
        elif character in "ab>":
            assert i not in marked, "data became template text"
    spans = spans_of(result)
    assert all(b < e for b, e in spans)
    assert all(e < b for (_, e), (b, _) in pairwise(spans))


@given(mixed(), mixed())
def test_concatenation(a: str, b: str) -> None:
    check(a + b, str.__str__(a) + str.__str__(b))
    check(TemplateText(a, spans_of(a)) + b, str.__str__(a) + str.__str__(b))


@given(mixed(), st.integers(-9, 9) | st.none(), st.integers(-9, 9) | st.none())
def test_slices(text: str, begin: int | None, end: int | None) -> None:
    check(text[begin:end], str.__str__(text)[begin:end])


@given(mixed())
def test_single_characters(text: str) -> None:
    plain = str.__str__(text)
    for i in range(-len(plain), len(plain)):
        check(text[i], plain[i])
    with pytest.raises(IndexError):
        text[len(plain)]


@given(mixed(), st.sampled_from([None, " ", "A", "aA", "|<>"]))
def test_strip(text: str, chars: str | None) -> None:
    plain = str.__str__(text)
    check(text.strip(chars), plain.strip(chars))
    check(text.lstrip(chars), plain.lstrip(chars))
    check(text.rstrip(chars), plain.rstrip(chars))


@given(mixed(), st.sampled_from(["|", "A", "a", "<|", "\n"]), st.integers(-1, 3))
def test_split(text: str, sep: str, count: int) -> None:
    plain = str.__str__(text)
    for name in ("split", "rsplit"):
        pieces = getattr(text, name)(sep, count)
        expected = getattr(plain, name)(sep, count)
        assert len(pieces) == len(expected)
        for piece, want in zip(pieces, expected, strict=True):
            check(piece, want)
    for name in ("partition", "rpartition"):
        for piece, want in zip(getattr(text, name)(sep), getattr(plain, name)(sep), strict=True):
            if want != sep:  # without a match the separator itself is not searched for
                check(piece, want)


@given(mixed(), st.booleans())
def test_lines(text: str, keepends: bool) -> None:
    expected = str.__str__(text).splitlines(keepends)
    for piece, want in zip(text.splitlines(keepends), expected, strict=True):
        check(piece, want)


@given(mixed(), st.sampled_from(["|", "A", "a>"]), st.text("ab", max_size=3), st.integers(-1, 2))
def test_replace_by_data(text: str, old: str, new: str, count: int) -> None:
    expected = str.__str__(text).replace(old, new, count)
    if isinstance(text, TemplateText):
        check(text.replace(old, new, count), expected)


@given(st.lists(mixed()), st.text(TEMPLATE, min_size=1, max_size=3))
def test_join_and_repeat(parts: list[str], separator: str) -> None:
    literal = TemplateText.literal(separator)
    check(literal.join(parts), separator.join(map(str.__str__, parts)))
    check(literal * 3, separator * 3)
    check(2 * literal, separator * 2)


@given(mixed())
def test_prefixes_and_case(text: str) -> None:
    plain = str.__str__(text)
    check(text.removeprefix("A"), plain.removeprefix("A"))
    check(text.removesuffix("a"), plain.removesuffix("a"))
    for name in ("lower", "upper", "title", "capitalize"):
        assert str.__str__(getattr(text, name)()) == getattr(plain, name)()


def test_case_that_changes_lengths_becomes_data() -> None:
    assert spans_of(TemplateText.literal("ß").upper()) == ()


@given(st.text("abc<>", min_size=1, max_size=20))
def test_unknown_operations_become_data(text: str) -> None:
    literal = TemplateText.literal("\t<E>" + text)
    for result in (literal.center(40), literal.zfill(40), literal[::-1], literal.expandtabs()):
        assert spans_of(result) == ()


def test_behaves_as_a_string() -> None:
    literal = TemplateText.literal("user")
    assert literal == "user"
    assert {"user": 1}[literal] == 1
    assert hash(literal) == hash("user")
    assert type(literal.plain) is str
    assert spans_of(str(literal)) == ((0, 4),)


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("<A>%s<B>", ("x",), "<A>x<B>"),
        ("<A>%s%%%5.1f<B>", ("x", 2.0), "<A>x%  2.0<B>"),
        ("<A>%(k)s<B>", {"k": "x"}, "<A>x<B>"),
        ("<A>%d<B>", 7, "<A>7<B>"),
    ],
)
def test_percent(text: str, values: object, expected: str) -> None:
    result = percent_text(TemplateText.literal(text), values)
    assert result == expected
    marked = {i for begin, end in spans_of(result) for i in range(begin, end)}
    assert all((character in "<>AB%") == (i in marked) for i, character in enumerate(expected))


def test_percent_with_a_variable_width_is_data() -> None:
    assert spans_of(percent_text(TemplateText.literal("<A>%*d"), (4, 7))) == ()
