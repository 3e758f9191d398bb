"""Byte-level BPE: text to ids and ids to bytes.

The Rust tokenizer is built without added tokens, so that plain text can never become a control token;
control tokens come only from characters that a template wrote (see `provenance`).
"""

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from ninfer.errors import FrontendError
from ninfer.frontend.provenance import spans_of
from ninfer.frontend.resources import TOKENIZER, TextResources

QWEN_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CACHED_FROM = 256  # characters; shorter segments are encoded faster than they are worth keeping
_CACHE_CHARACTERS = 4 << 20
_PIECE = 1 << 18


@dataclass(frozen=True, slots=True)
class Control:
    """A control token in an encoded text: its offset in the tokens, its characters `[begin, end)`."""

    content: str
    offset: int
    begin: int
    end: int


class Tokenizer:
    """Encodes and decodes within ids `[0, public_tokens)`. Safe to use from several threads."""

    def __init__(self, resources: TextResources, *, qwen: bool) -> None:
        """Build from checked resources; raises FrontendError if the tokenizer is of an unsupported kind."""
        self.public_tokens = resources.public_tokens
        self._rust = _build(resources.tokenizer, qwen=qwen)
        self._added = resources.added
        self._controls = {token.content: token.id for token in resources.added.values()}
        self._control_pattern = _any_of(self._controls)
        self._visible_pattern = _any_of(t.content for t in resources.added.values() if not t.special)
        self._bytes: list[bytes | None] = [None] * resources.public_tokens
        self._cache = _SegmentCache(_CACHE_CHARACTERS)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. Spellings of control tokens become those only where the text is template text."""
        return self.encode_marked(text)[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each of many plain texts, as by `encode`, on all cores; nothing is kept of them."""
        try:
            # Of the library's ways to encode, the batch lets other threads run meanwhile.
            return [one.ids for one in self._rust.encode_batch_fast(texts, add_special_tokens=False)]
        except (UnicodeEncodeError, TypeError) as error:
            raise FrontendError(
                "The text contains an unpaired surrogate, which is not valid Unicode."
            ) from error

    def encode_marked(self, text: str) -> tuple[list[int], list[Control]]:
        """Ids of `text` as by `encode`, and its control tokens in order."""
        plain = str.__str__(text)
        ids: list[int] = []
        controls: list[Control] = []
        cursor = 0
        if self._control_pattern is not None:
            for begin, end in spans_of(text):
                for match in self._control_pattern.finditer(plain, begin, end):
                    self._encode_segment(plain[cursor : match.start()], ids)
                    controls.append(Control(match.group(), len(ids), match.start(), match.end()))
                    ids.append(self._controls[match.group()])
                    cursor = match.end()
        self._encode_segment(plain[cursor:], ids)
        return ids, controls

    def count_until(self, text: str, most: int) -> int:
        """How many tokens plain `text` has, about, or some number above `most`; nothing is kept of it."""
        count = 0
        for begin in range(0, len(text), _PIECE):
            count += len(self._encode_plain(text[begin : begin + _PIECE]))
            if count > most:
                break
        return count

    def encode_exactly(self, text: str) -> list[int]:
        """Ids that spell `text` byte for byte, as a model would write it: visible added tokens where their
        spellings stand, hidden ones never, and single bytes for what the normalizer would change."""
        ids: list[int] = []
        cursor = 0
        for match in self._visible_pattern.finditer(text) if self._visible_pattern else ():
            ids += self._encode_bytes(text[cursor : match.start()])
            ids.append(self._controls[match.group()])
            cursor = match.end()
        return ids + self._encode_bytes(text[cursor:])

    def _encode_bytes(self, text: str) -> list[int]:
        if not text:
            return []
        ids, data = self._encode_plain(text), text.encode("utf-8")
        if b"".join(map(self.token_bytes, ids)) != data:
            spelled = (self._rust.token_to_id(_SPELLING[byte]) for byte in data)
            ids = [i for i in spelled if i is not None]
        return ids

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """The text of `ids`; ill-formed bytes become U+FFFD. Special tokens are left out unless asked for."""
        pieces = (b"" if self.is_special(i) and not keep_special else self.token_bytes(i) for i in ids)
        return b"".join(pieces).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for. Raises FrontendError outside the public ids."""
        if not 0 <= token_id < self.public_tokens:
            raise FrontendError(
                f"Token id {token_id} is outside the tokenizer's 0..{self.public_tokens - 1}."
            )
        known = self._bytes[token_id]
        if known is None:
            added = self._added.get(token_id)
            if added is not None:
                known = added.content.encode("utf-8")
            else:
                known = _spelled_bytes(self._rust.id_to_token(token_id) or "")
            self._bytes[token_id] = known
        return known

    def is_special(self, token_id: int) -> bool:
        """Whether the token is hidden from answers (`special` in the tokenizer's files)."""
        added = self._added.get(token_id)
        return added is not None and added.special

    def control_id(self, content: str) -> int | None:
        """The id of an added token by its exact content."""
        return self._controls.get(content)

    def _encode_segment(self, text: str, into: list[int]) -> None:
        if not text:
            return
        if len(text) < _CACHED_FROM:
            into += self._encode_plain(text)
            return
        ids = self._cache.get(text)
        if ids is None:
            ids = self._encode_plain(text)
            self._cache.put(text, ids)
        into += ids

    def _encode_plain(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]


class _SegmentCache:
    """Ids of recently encoded long segments, so that a chat does not encode its whole history every turn.

    Bounded by the characters held; the least recently used segment goes first.
    """

    def __init__(self, characters: int) -> None:
        self._limit = characters
        self._held = 0
        self._ids: OrderedDict[str, list[int]] = OrderedDict()
        self._lock = Lock()

    def get(self, text: str) -> list[int] | None:
        with self._lock:
            ids = self._ids.get(text)
            if ids is not None:
                self._ids.move_to_end(text)
            return ids

    def put(self, text: str, ids: list[int]) -> None:
        with self._lock:
            if len(text) > self._limit or text in self._ids:
                return
            self._ids[text] = ids
            self._held += len(text)
            while self._held > self._limit:
                oldest, _ = self._ids.popitem(last=False)
                self._held -= len(oldest)


def _any_of(spellings: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds the leftmost, then longest of `spellings`."""
    ordered = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _build(document: dict[str, Any], *, qwen: bool) -> RustTokenizer:
    model = document["model"]
    _check_model(model, allow_ignore_merges=not qwen)
    shell = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": document.get("normalizer"),
        "pre_tokenizer": document.get("pre_tokenizer"),
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    decoder = document.get("decoder")
    if decoder is not None and (not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel"):
        raise FrontendError(f"{TOKENIZER}: the decoder must be ByteLevel.")
    if qwen:
        shell["normalizer"], shell["pre_tokenizer"] = _qwen_pipeline(document)
    elif not _is_byte_level(shell["pre_tokenizer"]):
        raise FrontendError(
            f"{TOKENIZER}: only byte-level BPE is supported; the pre-tokenizer has no ByteLevel step "
            "without prefix space."
        )
    try:
        rust = RustTokenizer.from_str(json.dumps(shell))
        rust.model = BPE(  # pyright: ignore[reportAttributeAccessIssue]
            vocab=model["vocab"],
            merges=_merges(model.get("merges"), model["vocab"]),
            ignore_merges=bool(model.get("ignore_merges")),
        )
    except FrontendError:
        raise
    except Exception as error:  # the Rust library raises the bare class
        cause = (str(error) or type(error).__name__).splitlines()[0]
        raise FrontendError(f"{TOKENIZER} cannot be loaded: {cause}.") from error
    return rust


def _check_model(model: dict[str, Any], *, allow_ignore_merges: bool) -> None:
    kind = model.get("type", "BPE")
    if kind != "BPE":
        raise FrontendError(f"{TOKENIZER}: model.type must be BPE, not {kind!r}.")
    refused = ["dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"]
    if not allow_ignore_merges:
        refused.append("ignore_merges")
    for name in refused:
        if model.get(name):
            raise FrontendError(
                f"{TOKENIZER}: model.{name} = {model[name]!r} is not supported (must be unset)."
            )


def _merges(merges: Any, vocab: dict[str, int]) -> list[tuple[str, str]]:
    if not isinstance(merges, list):
        raise FrontendError(f"{TOKENIZER}: model.merges must be an array.")
    pairs = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in merges]
    if set(map(len, pairs)) - {2}:
        bad = next(m for m, pair in zip(merges, pairs, strict=True) if len(pair) != 2)
        raise FrontendError(f"{TOKENIZER}: merge {bad!r} is not a pair of tokens.")
    unknown = set(map("".join, pairs)) - vocab.keys()  # the library would panic
    if unknown:
        raise FrontendError(f"{TOKENIZER}: a merge makes {min(unknown)!r}, which is not in model.vocab.")
    return pairs  # pyright: ignore[reportReturnType]


def _qwen_pipeline(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Normalizer and pre-tokenizer of a Qwen model; a file may leave them out, but not say otherwise."""
    normalizer = document.get("normalizer")
    if normalizer is not None and normalizer != {"type": "NFC"}:
        raise FrontendError(f"{TOKENIZER}: the normalizer of a Qwen model must be NFC.")
    split = {"type": "Split", "pattern": {"Regex": QWEN_REGEX}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    given = document.get("pre_tokenizer")
    if given is not None:
        steps = given.get("pretokenizers") if isinstance(given, dict) else None
        if not isinstance(steps, list) or len(steps) != 2 or not all(isinstance(s, dict) for s in steps):
            raise FrontendError(f"{TOKENIZER}: the pre-tokenizer of a Qwen model must be [Split, ByteLevel].")
        if {**split, **steps[0]} != split:
            raise FrontendError(f"{TOKENIZER}: the Split pattern is not the one of Qwen models.")
        if {**byte_level, **steps[1], "trim_offsets": False} != byte_level:
            raise FrontendError(f"{TOKENIZER}: ByteLevel must have neither a prefix space nor its own regex.")
    return {"type": "NFC"}, {"type": "Sequence", "pretokenizers": [split, byte_level]}


def _is_byte_level(step: Any) -> bool:
    if not isinstance(step, dict):
        return False
    if step.get("type") == "Sequence":
        steps = step.get("pretokenizers")
        return isinstance(steps, list) and any(map(_is_byte_level, steps))
    return step.get("type") == "ByteLevel" and not step.get("add_prefix_space", True)


def _byte_alphabet() -> dict[str, int]:
    """The character byte-level BPE writes for each byte: printable Latin-1 as is, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable}
    alphabet.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return alphabet


_ALPHABET = _byte_alphabet()
_SPELLING = {byte: character for character, byte in _ALPHABET.items()}
# From the alphabet to Latin-1, and what Latin-1 has beside the alphabet to something that it hasn't.
_LATIN = {**dict.fromkeys(range(256), 0xFFFF), **{ord(c): byte for c, byte in _ALPHABET.items()}}


def _spelled_bytes(token: str) -> bytes:
    try:
        return token.translate(_LATIN).encode("latin-1")
    except UnicodeEncodeError:  # not written in the byte alphabet: the text itself
        return token.encode("utf-8")
