"""Every rule about the four text resources fails in a sentence that names the resource."""

import json
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.errors import FrontendError
from ninfer.frontend import Frontend

from .conftest import _LLAMA_DOCUMENTS, _QWEN_DOCUMENTS, LLAMA, QWEN, Documents, added


def build(documents: Documents, *, architecture: str = QWEN, rows: int = 1000, **changes: bytes) -> Frontend:
    resources = documents.resources()
    resources.update({name.replace("__", "."): data for name, data in changes.items()})
    return Frontend.from_resources(resources, architecture=architecture, vocab_rows=rows)


def test_domain_joins_both_files(qwen: Frontend) -> None:
    assert qwen.public_tokens == qwen._tokenizer.control_id("<|audio_pad|>") + 1  # type: ignore[operator]
    assert qwen.stop_token_ids == (
        qwen._tokenizer.control_id("<|im_end|>"),
        qwen._tokenizer.control_id("<|endoftext|>"),
    )


@pytest.mark.parametrize(
    "role", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
)
def test_missing_empty_and_not_utf8(qwen_documents: Documents, role: str) -> None:
    resources = qwen_documents.resources()
    for data, words in ((None, "lacks the resource"), (b"", "is empty"), (b"ab\xff", "not UTF-8 .byte 2")):
        changed = dict(resources)
        del changed[role]
        if data is not None:
            changed[role] = data
        with pytest.raises(FrontendError, match=words) as caught:
            Frontend.from_resources(changed, architecture=QWEN, vocab_rows=1000)
        assert role in str(caught.value)


@pytest.mark.parametrize("data", [b"{", b"[1]", b"7", b"[" * 100_000])
def test_json_must_be_an_object(qwen_documents: Documents, data: bytes) -> None:
    with pytest.raises(
        FrontendError, match=r"generation_config\.json (is not valid JSON|must be a JSON object)"
    ):
        build(qwen_documents, generation_config__json=data)


def test_gap_and_too_many_tokens(qwen_documents: Documents) -> None:
    with pytest.raises(FrontendError, match="only 20 rows"):
        build(qwen_documents, rows=20)
    first = qwen_documents.tokenizer["added_tokens"][0]["id"]
    del qwen_documents.tokenizer["added_tokens"][0]
    del qwen_documents.config["added_tokens_decoder"][str(first)]
    with pytest.raises(FrontendError, match=f"id {first} is missing"):
        build(qwen_documents)


@pytest.mark.parametrize("change", ["content", "special"])
def test_definitions_must_agree(qwen_documents: Documents, change: str) -> None:
    entry = qwen_documents.config["added_tokens_decoder"][
        str(qwen_documents.tokenizer["added_tokens"][0]["id"])
    ]
    entry[change] = "other" if change == "content" else False
    with pytest.raises(FrontendError, match="disagree about token"):
        build(qwen_documents)


def test_one_content_one_id(qwen_documents: Documents) -> None:
    tokens = qwen_documents.tokenizer["added_tokens"]
    tokens.append(added(tokens[-1]["id"] + 8, "<think>", False))
    with pytest.raises(FrontendError, match="'<think>' has two ids"):
        build(qwen_documents)


def test_added_token_against_vocabulary(qwen_documents: Documents) -> None:
    qwen_documents.tokenizer["added_tokens"][3]["content"] = "a"
    with pytest.raises(FrontendError, match=r"'a' is id \d+ in model.vocab but added as"):
        build(qwen_documents)


def test_added_token_on_a_vocabulary_id(qwen_documents: Documents) -> None:
    qwen_documents.tokenizer["added_tokens"].append(added(5, "<new>", True))
    with pytest.raises(FrontendError, match="id 5 belongs to an entry"):
        build(qwen_documents)


@pytest.mark.parametrize("value", [True, 1.5, "3"])
def test_vocabulary_ids_are_integers(qwen_documents: Documents, value: object) -> None:
    qwen_documents.tokenizer["model"]["vocab"]["zzz"] = value
    with pytest.raises(FrontendError, match="must be an integer"):
        build(qwen_documents)


def test_shared_vocabulary_id(qwen_documents: Documents) -> None:
    qwen_documents.tokenizer["model"]["vocab"]["zzz"] = 3
    with pytest.raises(FrontendError, match="share an id"):
        build(qwen_documents)


def test_huge_id(qwen_documents: Documents) -> None:
    qwen_documents.tokenizer["model"]["vocab"]["zzz"] = 1_000_001
    with pytest.raises(FrontendError, match=r"0\.\.1000000"):
        build(qwen_documents)


@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip", "normalized"])
def test_added_token_flags(qwen_documents: Documents, flag: str) -> None:
    qwen_documents.tokenizer["added_tokens"][1][flag] = True
    with pytest.raises(FrontendError, match=flag):
        build(qwen_documents)


@pytest.mark.parametrize("eos", [None, [], [1.0], True, ["1"], [True]])
def test_stop_ids_are_required(qwen_documents: Documents, eos: object) -> None:
    qwen_documents.generation = {"eos_token_id": eos}
    with pytest.raises(FrontendError, match="eos_token_id must be an integer"):
        build(qwen_documents)


@pytest.mark.parametrize("eos", [-1, 100_000, [0, 100_000]])
def test_stop_ids_lie_in_the_domain(qwen_documents: Documents, eos: object) -> None:
    qwen_documents.generation = {"eos_token_id": eos}
    with pytest.raises(FrontendError, match="outside the tokenizer's"):
        build(qwen_documents)


@pytest.mark.parametrize(
    ("member", "value", "words"),
    [
        ("type", "Unigram", "must be BPE"),
        ("dropout", 0.1, "dropout"),
        ("continuing_subword_prefix", "##", "continuing_subword_prefix"),
        ("end_of_word_suffix", "</w>", "end_of_word_suffix"),
        ("ignore_merges", True, "ignore_merges"),
        ("merges", [["a", "b", "c"]], "not a pair"),
        ("merges", [["a", "nowhere"]], "'anowhere', which is not in model.vocab"),
        ("merges", [["", "a"]], "cannot be loaded"),
        ("merges", [["a", 3]], "cannot be loaded"),
        ("merges", ["ab"], "not a pair"),
        ("merges", [5], "cannot be loaded"),
        ("merges", None, "must be an array"),
        ("vocab", {}, "non-empty"),
    ],
)
def test_model_subset(qwen_documents: Documents, member: str, value: object, words: str) -> None:
    qwen_documents.tokenizer["model"][member] = value
    with pytest.raises(FrontendError, match=words):
        build(qwen_documents)


def test_qwen_pipeline_is_fixed(qwen_documents: Documents) -> None:
    for name, value, words in (
        ("normalizer", {"type": "NFKC"}, "must be NFC"),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False}, r"\[Split, ByteLevel\]"),
        ("decoder", {"type": "WordPiece"}, "must be ByteLevel"),
    ):
        changed = qwen_documents.copy()
        changed.tokenizer[name] = value
        with pytest.raises(FrontendError, match=words):
            build(changed)
    for step, member, value in (
        (0, "behavior", "Removed"),
        (1, "use_regex", True),
        (1, "add_prefix_space", True),
    ):
        changed = qwen_documents.copy()
        changed.tokenizer["pre_tokenizer"]["pretokenizers"][step][member] = value
        with pytest.raises(FrontendError, match=r"Split|ByteLevel"):
            build(changed)


def test_qwen_pipeline_may_be_left_out(qwen_documents: Documents, qwen: Frontend) -> None:
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        qwen_documents.tokenizer.pop(name, None)
    bare = build(qwen_documents)
    text = "I'll say: größer e\u0301 1234, いろは\n\n  ok"
    assert bare.encode(text) == qwen.encode(text)


def test_qwen_config(qwen_documents: Documents) -> None:
    for name, value in (("add_bos_token", True), ("add_prefix_space", True), ("pad_token", "<|im_end|>")):
        changed = qwen_documents.copy()
        changed.config[name] = value
        with pytest.raises(FrontendError, match=name):
            build(changed)


def test_special_token_may_be_an_object(qwen_documents: Documents) -> None:
    qwen_documents.config["pad_token"] = {"content": "<|endoftext|>", "special": True}
    build(qwen_documents)
    qwen_documents.config["eos_token"] = 5
    with pytest.raises(FrontendError, match="eos_token must be a string"):
        build(qwen_documents)


def test_merges_in_both_spellings(qwen_documents: Documents, qwen: Frontend) -> None:
    merges = qwen_documents.tokenizer["model"]["merges"]
    qwen_documents.tokenizer["model"]["merges"] = [" ".join(pair) for pair in merges]
    assert build(qwen_documents).encode("the quick brown fox") == qwen.encode("the quick brown fox")


def test_llama_accepts_what_converters_write(llama_documents: Documents) -> None:
    frontend = build(llama_documents, architecture=LLAMA)
    assert frontend.stop_token_ids == (2,)
    assert frontend.bos_token_id == 1
    llama_documents.tokenizer["model"]["ignore_merges"] = True
    build(llama_documents, architecture=LLAMA)


def test_llama_must_be_byte_level(llama_documents: Documents) -> None:
    llama_documents.tokenizer["pre_tokenizer"] = {"type": "Metaspace", "replacement": "_"}
    with pytest.raises(FrontendError, match="only byte-level BPE"):
        build(llama_documents, architecture=LLAMA)


def test_unknown_architecture(qwen_documents: Documents) -> None:
    with pytest.raises(FrontendError, match="'MambaForCausalLM'; known are"):
        build(qwen_documents, architecture="MambaForCausalLM")


@pytest.mark.parametrize("junk", [5, "x", [1], {"a": {}}, {"-1": {}}, {"3": 4}])
def test_garbage_in_the_token_lists(qwen_documents: Documents, junk: object) -> None:
    changed = qwen_documents.copy()
    changed.config["added_tokens_decoder"] = junk
    with pytest.raises(FrontendError):
        build(changed)
    changed = qwen_documents.copy()
    changed.tokenizer["added_tokens"] = junk
    with pytest.raises(FrontendError):
        build(changed)


def test_tokenizer_without_a_model(qwen_documents: Documents) -> None:
    with pytest.raises(FrontendError, match=r"model\.vocab"):
        build(qwen_documents, tokenizer__json=json.dumps({"model": []}).encode())


JUNK: list[Any] = [None, True, -1, 1.5, 2**70, "", "x", "\ud800", [], [[]], {}, {"type": "x"}, {"a": [1]}]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Places in a document: every member, and the first few items of long ones."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())[:30]
    elif isinstance(value, list):
        items = list(enumerate(value))[:4]
    return [path, *(found for key, inner in items for found in _paths(inner, (*path, key)))]


def _change_and_build(data: st.DataObject) -> None:
    documents = _QWEN_DOCUMENTS.copy() if data.draw(st.booleans()) else _LLAMA_DOCUMENTS.copy()
    roots = {"tokenizer": documents.tokenizer, "config": documents.config, "generation": documents.generation}
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(_paths(roots)[1:]))
        holder: Any = roots
        try:
            for key in path[:-1]:
                holder = holder[key]
            if data.draw(st.booleans()):
                holder[path[-1]] = deepcopy(data.draw(st.sampled_from(JUNK)))
            else:
                del holder[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue  # the first change took the place away
    changed = Documents(
        roots.get("tokenizer", {}), roots.get("config", {}), documents.template, roots.get("generation", {})
    )
    outcome = ""
    try:
        build(changed, architecture=data.draw(st.sampled_from([QWEN, LLAMA]))).render(
            [{"role": "user", "content": "Hi <think> there"}]
        )
    except FrontendError as error:
        outcome = str(error)
    assert not outcome or (outcome.endswith(".") and "\n" not in outcome)


@given(st.data())
@settings(max_examples=150)
def test_any_change_is_accepted_or_refused_in_a_sentence(data: st.DataObject) -> None:
    _change_and_build(data)


@pytest.mark.soak
@given(st.data())
@settings(max_examples=20_000)
def test_many_changes_are_accepted_or_refused_in_a_sentence(data: st.DataObject) -> None:
    _change_and_build(data)


def test_steps_of_the_pre_tokenizer_must_be_an_array(llama_documents: Documents) -> None:
    llama_documents.tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": True}
    with pytest.raises(FrontendError, match="only byte-level BPE"):
        build(llama_documents, architecture=LLAMA)
