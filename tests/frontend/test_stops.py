"""The scanner against a scalar search in the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from ninfer.frontend.stops import Match, Scanner

PIECES = st.lists(st.text("ab", max_size=5), max_size=12)
PATTERNS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def oracle(pieces: list[str], patterns: list[str]) -> tuple[int, int, int] | None:
    """(piece, begin in the whole text, pattern) of the winner: earliest piece, begin, declaration."""
    text = ""
    for number, piece in enumerate(pieces):
        text += piece
        found = [(text.find(p), i) for i, p in enumerate(patterns) if p in text]
        if found:
            begin, pattern = min(found)
            return number, begin, pattern
    return None


@given(PIECES, PATTERNS)
def test_finds_what_a_plain_search_finds(pieces: list[str], patterns: list[str]) -> None:
    scanner = Scanner(patterns)
    seen = ""
    match: Match | None = None
    for number, piece in enumerate(pieces):
        start = len(seen) - scanner.pending
        match = scanner.feed(piece)
        seen += piece
        if match is not None:
            window = seen[start:]
            assert window[match.begin : match.end] == patterns[match.pattern]
            assert oracle(pieces, patterns) == (number, start + match.begin, match.pattern)
            break
        longest = max((k for p in patterns for k in range(len(p)) if seen.endswith(p[:k])), default=0)
        assert scanner.pending == longest
    if match is None:
        assert oracle(pieces, patterns) is None


def test_work_is_linear_for_periodic_patterns() -> None:
    """A pattern of 20,000 equal characters does not make each piece cost its length."""
    scanner = Scanner(["a" * 20_000 + "b"])
    for _ in range(200):
        assert scanner.feed("a" * 300) is None
    assert scanner.pending == 20_000
    match = scanner.feed("b")
    assert match == Match(0, 20_001, 0)
