"""The committed tokenizer: its ids, in our frontend and in transformers; training it is repeatable."""

import functools
import json
import random
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.tasks import generators
from bench.tasks.task import rng_for
from ninfer.frontend import Frontend, maintained_template
from tools.nano import tokenizer as nano
from tools.nano.checkpoint import RESOURCES
from tools.nano.geometry import BPE_TOKENS, VOCAB_ROWS
from tools.nano.samples import task_texts, text_of


def frontend(folder: Path) -> Frontend:
    resources = {role: (folder / role).read_bytes() for role in RESOURCES}
    return Frontend.from_resources(resources, architecture="Qwen3_5ForCausalLM", vocab_rows=VOCAB_ROWS)


@functools.cache
def _shared() -> Frontend:
    return frontend(nano.TOKENIZER)


@pytest.fixture(scope="module")
def ours() -> Frontend:
    return _shared()


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(nano.TOKENIZER)


TEXTS = (
    "Hello, it's a test: 12345 apples aren't 1,000.5 pears.\n\n\tTabs  and   blanks \r\nend ",
    "def add(a: int, b: int) -> int:\n    # sum\n    return a + b\n\n\nprint(f'{add(1, 2)=}')\n",
    '{"name": "Ida", "tags": ["a", "b"], "n": [1, 2.5, null, true]}\n',
    "naïve café, Füße, Łódź, 日本語, עברית, 👩‍👩‍👧 and \u00bd",
    "",
)


def test_committed_files_are_what_the_code_writes() -> None:
    folder = nano.TOKENIZER
    assert json.loads((folder / "tokenizer_config.json").read_text()) == nano.tokenizer_config()
    assert json.loads((folder / "generation_config.json").read_text()) == nano.generation_config()
    assert (folder / "chat_template.jinja").read_text("utf-8") == maintained_template("qwen3_6")


def test_ids(ours: Frontend) -> None:
    document = json.loads((nano.TOKENIZER / "tokenizer.json").read_text("utf-8"))
    vocab = document["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(BPE_TOKENS))
    assert len(document["model"]["merges"]) == BPE_TOKENS - 256
    assert [(e["id"], e["content"]) for e in document["added_tokens"]] == [
        (BPE_TOKENS + i, token) for i, token in enumerate(nano.ADDED[:26])
    ]
    assert len(nano.ADDED) == 33
    hidden = [e["content"] for e in document["added_tokens"] if not e["special"]]
    assert hidden == list(nano.MARKERS)
    # Offsets of the family's table (spec of the model, 1.5), whose first added id is 248044.
    for token, family in {
        "<|im_end|>": 248046, "<|vision_start|>": 248053, "<|image_pad|>": 248056, "<tool_call>": 248058,
        "<|fim_prefix|>": 248060, "<|file_sep|>": 248065, "</tool_response>": 248067, "<think>": 248068,
        "<|audio_start|>": 248070, "<|audio_pad|>": 248076,
    }.items():  # fmt: skip
        assert nano.ADDED.index(token) == family - 248044, token
    assert ours.decode([BPE_TOKENS + 24]) == "<think>"
    assert ours.decode([BPE_TOKENS + 2]) == ""


@pytest.mark.parametrize("text", TEXTS)
def test_same_ids_as_transformers(ours: Frontend, theirs, text: str) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert all(0 <= i < BPE_TOKENS for i in ids)
    assert ours.decode(ids) == text


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_round_trips(text: str) -> None:
    encoder = _shared()
    assert encoder.decode(encoder.encode(text)) == unicodedata.normalize("NFC", text)


def test_conversation_renders_as_in_transformers(ours: Frontend, theirs) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <|im_end|> there"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Add 2 and 3."},
    ]
    plain = [dict(m, content=m["content"].replace("<|im_end|>", "x")) for m in messages]
    text = theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert list(ours.render(plain).tokens) == theirs.encode(text, add_special_tokens=False)
    # A control token's spelling in a message stays text.
    assert list(ours.render(messages).tokens).count(BPE_TOKENS + 2) == len(messages)


def test_stops(ours: Frontend) -> None:
    assert tuple(ours.stop_token_ids) == (BPE_TOKENS + 2, BPE_TOKENS)


def test_task_texts(ours: Frontend) -> None:
    texts = list(task_texts(300))
    assert len(texts) >= len(generators())
    assert all(texts)
    for text in random.Random(1).sample(texts, 20):
        ids = ours.encode(text)
        assert ours.decode(ids) == text
        assert len(ids) < 0.75 * len(text)


def test_task_text_has_all_parts() -> None:
    task = generators()["tool_thinking"](rng_for("tool_thinking", "train", 0), "train")
    text = text_of(task)
    for message in task.messages:
        assert (message.get("content") or "") in text
    assert task.tools[0]["function"]["name"] in text


def test_training_is_repeatable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nano, "BPE_TOKENS", 600)
    texts = [text * 3 for text in TEXTS] + list(task_texts(200))
    first, second = nano.train(texts), nano.train(list(texts))
    assert json.dumps(first) == json.dumps(second)
    assert len(first["model"]["vocab"]) == 600
    nano.write(tmp_path, first)
    built = frontend(tmp_path)
    for text in TEXTS:
        assert built.decode(built.encode(text)) == text
