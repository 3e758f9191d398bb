"""English prose from pages of documentation: paragraphs, headings and list items, nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser

# What holds no prose: scripts, listings, tables, navigation. Void elements never get here.
_SKIPPED = frozenset((
    "head", "script", "style", "pre", "table", "nav", "footer", "header", "svg", "math", "button",
    "select", "textarea", "form", "iframe", "noscript",
))  # fmt: skip
_SKIPPED_CLASSES = re.compile(
    r"headerlink|viewcode|sphinxsidebar|(?<![a-z])sidebar(?!-visible)|navheader|navfooter|related|footer"
    r"|highlight|toctree|breadcrumb|\bsig\b|programlisting|synopsis|nav-wrapper|menu-bar|\btoc\b|versionmodified|contents|langs|classifier"
)
_BLOCKS = frozenset((
    "p", "li", "dd", "dt", "dl", "ul", "ol", "div", "section", "article", "blockquote", "body", "h1",
    "h2", "h3", "h4", "h5", "h6", "hr", "main", "center", "td",
))  # fmt: skip
_VOID = frozenset((
    "br", "img", "hr", "input", "meta", "link", "area", "base", "col", "embed", "source", "track", "wbr",
))  # fmt: skip
_HEADINGS = frozenset(("h1", "h2", "h3", "h4", "h5", "h6"))


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[tuple[str, str]] = []  # kind (p, h, li, dt) and text
        self._kind = "p"
        self._text: list[str] = []
        self._skipping = ""  # the tag whose content is left out, and how deep it is nested in itself
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipping:
            self._depth += tag == self._skipping
            return
        if tag in _BLOCKS:
            self.flush()
            self._kind = "h" if tag in _HEADINGS else tag if tag in ("li", "dt") else self._inner(tag)
        if tag == "br":
            self._text.append(" ")
        classes = next((value or "" for name, value in attrs if name == "class"), "")
        hidden = any(name == "role" and value in ("navigation", "search") for name, value in attrs)
        listing = tag in _SKIPPED or hidden or (classes and _SKIPPED_CLASSES.search(classes))
        if listing and tag not in _VOID and tag not in ("body", "html", "main"):
            self._skipping, self._depth = tag, 1

    def handle_endtag(self, tag: str) -> None:
        if self._skipping:
            self._depth -= tag == self._skipping
            if self._depth == 0:
                self._skipping = ""
            return
        if tag in _BLOCKS:
            self.flush()
            self._kind = "p"

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self._text.append(data)

    def _inner(self, tag: str) -> str:
        """A paragraph that opens a list item belongs to the item."""
        return "li" if tag == "p" and self._kind == "li" else "p"

    def flush(self) -> None:
        """End the block that is being read."""
        text = " ".join("".join(self._text).split())
        self._text.clear()
        if text:
            self.blocks.append((self._kind, text))
            self._kind = "p"


def prose_of(page: str) -> str:
    """The page as paragraphs with an empty line between them; list items start with `- `."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    reader.flush()
    lines: list[str] = []
    kinds: list[str] = []
    for kind, text in reader.blocks:
        text = plain(text)
        if kind in ("h", "dt"):
            text = re.sub(r"^[\dA-Z]{0,2}(\.\d+)*\.?\s+(?=[A-Z])", "", text).rstrip("#¶ ")
            keep = len(text) < 90 and is_natural(text, short=True)
        else:
            keep = is_natural(text, short=kind == "li")
        if keep:
            lines.append(f"- {text}" if kind == "li" else text)
            kinds.append(kind)
    # A heading or term with nothing under it says nothing.
    kept: list[str] = []
    for index, (kind, line) in enumerate(zip(kinds, lines, strict=True)):
        following = kinds[index + 1] if index + 1 < len(kinds) else ""
        if kind == "h" and following not in ("p", "li", "dt"):
            continue
        if kind == "dt" and following not in ("p", "li"):
            continue
        kept.append(line)
    return "\n\n".join(kept).replace("\n\n- ", "\n- ")


_TYPOGRAPHY = str.maketrans({
    "‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "--", "…": "...", "\u00a0": " ", "\u00ad": None,
    "\u200b": None, "\ufeff": None, "‐": "-", "‑": "-", "−": "-", "\u2028": " ", "¶": None, "§": None,
    "\ufffd": None,
})  # fmt: skip


def plain(text: str) -> str:
    """Typographic quotes, dashes and blanks as ASCII; white space collapsed."""
    return " ".join(text.translate(_TYPOGRAPHY).split())


_CODE_LIKE = re.compile(r"[_()\[\]{}<>=/\\|@#$%^*~+]|\w\.\w|[a-z][A-Z]|::|--\w")


def is_natural(text: str, *, short: bool) -> bool:
    """Whether the text reads as English: letters, few code-like words; sentences unless `short`."""
    words = text.split()
    if not words or (not short and len(words) < 5):
        return False
    letters = sum(c.isalpha() or c == " " for c in text)
    if letters < (0.8 if short else 0.86) * len(text):
        return False
    if sum(c.isascii() for c in text) < 0.97 * len(text):
        return False
    code = sum(1 for word in words if _CODE_LIKE.search(word))
    if code > 0.25 * len(words):
        return False
    return short or text[-1] in ".!?:;\"')" or len(words) >= 12


_COMMON = frozenset((
    "the", "of", "and", "to", "a", "is", "in", "for", "that", "it", "be", "are", "with", "as", "this",
    "on", "you", "or", "can", "not", "by",
))  # fmt: skip


def is_english(text: str) -> bool:
    """Whether enough of the words are those that any English text is full of."""
    words = text.lower().split()
    return len(words) >= 40 and sum(word in _COMMON for word in words) >= 0.17 * len(words)
