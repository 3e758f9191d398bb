"""Encoding plain and template text, and bytes of tokens, against the Rust library."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer

from ninfer.errors import FrontendError
from ninfer.frontend import Frontend
from ninfer.frontend.provenance import TemplateText, concatenate
from ninfer.frontend.tokenizer import _SegmentCache

from .conftest import CONFIG_ONLY, CORPUS, HIDDEN, VISIBLE

CONTROLS = HIDDEN + VISIBLE + CONFIG_ONLY
VALID = st.text(st.characters(codec="utf-8"))
MIXED = st.lists(st.one_of(VALID, st.sampled_from(CONTROLS))).map("".join)


@given(MIXED)
def test_plain_text_never_yields_a_control_token(qwen: Frontend, text: str) -> None:
    ids = qwen.encode(text)
    assert not {qwen._tokenizer.control_id(c) for c in CONTROLS} & set(ids)


@given(MIXED)
def test_template_text_is_encoded_as_by_the_library(
    qwen: Frontend, reference: RustTokenizer, text: str
) -> None:
    ids = qwen._tokenizer.encode(TemplateText.literal(text))
    assert ids == reference.encode(text, add_special_tokens=False).ids


@given(st.lists(st.tuples(st.booleans(), MIXED)))
def test_only_whole_spellings_of_the_template_count(
    qwen: Frontend, reference: RustTokenizer, parts: list[tuple[bool, str]]
) -> None:
    """Template and data alternate: what the data spell, or help to spell, is text."""
    text = concatenate(TemplateText.literal(part) if template else part for template, part in parts)
    ids = qwen._tokenizer.encode(text)
    found = [i for i in ids if qwen._tokenizer._added.get(i)]
    runs: list[str] = []
    last = False
    for template, part in parts:
        if not part:
            continue
        if template and last:
            runs[-1] += part
        elif template:
            runs.append(part)
        last = template
    expected = [
        i for run in runs for i in reference.encode(run, add_special_tokens=False).ids
        if qwen._tokenizer._added.get(i)
    ]  # fmt: skip
    assert found == expected


@given(st.lists(st.integers(0, 10_000)))
def test_decode_is_the_librarys(qwen: Frontend, reference: RustTokenizer, numbers: list[int]) -> None:
    ids = [n % qwen.public_tokens for n in numbers]
    assert qwen.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert qwen.decode(ids, keep_special=True) == reference.decode(ids, skip_special_tokens=False)


@given(VALID)
def test_round_trip_without_normalizer(llama: Frontend, text: str) -> None:
    assert llama.decode(llama.encode(text)) == text


def test_special_tokens_are_hidden_and_markers_shown(qwen: Frontend) -> None:
    for content in CONTROLS:
        token = qwen._tokenizer.control_id(content)
        assert token is not None
        assert qwen.decode([token]) == ("" if content not in VISIBLE else content)
        assert qwen.decode([token], keep_special=True) == content


@pytest.mark.parametrize("token", [-1, 10_000])
def test_ids_outside_the_domain(qwen: Frontend, token: int) -> None:
    with pytest.raises(FrontendError, match=f"Token id {token} is outside"):
        qwen.decode([token])


def test_unpaired_surrogates_are_refused(qwen: Frontend) -> None:
    for text in ("\ud83d", "ok \udc00 ok", "x" * 300 + "\udfff"):
        with pytest.raises(FrontendError, match="unpaired surrogate"):
            qwen.encode(text)


def test_segment_cache_is_bounded() -> None:
    cache = _SegmentCache(100)
    cache.put("a" * 60, [1])
    cache.put("b" * 30, [2])
    assert cache.get("a" * 60) == [1]
    cache.put("c" * 20, [3])
    assert cache.get("b" * 30) is None
    assert cache.get("a" * 60) == [1]
    cache.put("d" * 101, [4])
    assert cache.get("d" * 101) is None
    assert cache.get("c" * 20) == [3]


def test_cached_segments_are_not_shared_state(qwen: Frontend) -> None:
    text = CORPUS[0] * 10
    first = qwen.encode(text)
    first.append(-1)
    assert qwen.encode(text) == first[:-1]


def test_many_threads(qwen: Frontend) -> None:
    texts = [f"{i} {CORPUS[i % len(CORPUS)]}" * 20 for i in range(12)]
    expected = [qwen.encode(text) for text in texts]
    wrong: list[int] = []

    def work() -> None:
        for _ in range(5):
            wrong.extend(i for i, text in enumerate(texts) if qwen.encode(text) != expected[i])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
