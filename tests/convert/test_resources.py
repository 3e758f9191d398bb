"""Tokenizer, template and generation config: taken from a folder, or rebuilt from GGUF keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from ninfer.convert import resources
from ninfer.convert.gguf_file import GgufFile
from ninfer.errors import ConversionError

from . import exporter, tiny

REAL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


class FakeGguf:
    """Keys without a file."""

    def __init__(self, **changes: Any) -> None:
        self.path = Path("m.gguf")
        self.keys = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen35",
            "tokenizer.ggml.tokens": list(exporter.TOKENS),
            "tokenizer.ggml.token_type": list(exporter.TYPES),
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.ggml.padding_token_id": 0,
            "tokenizer.chat_template": "{{ messages }}",
        } | {f"tokenizer.{name.replace('__', '.')}": value for name, value in changes.items()}
        self.keys = {name: value for name, value in self.keys.items() if value is not None}


def _rebuilt(given: dict[str, Path] | None = None, **changes: Any) -> dict[str, bytes]:
    return resources.from_gguf(FakeGguf(**changes), given or {})  # type: ignore[arg-type]


def test_rebuilt_tokenizer() -> None:
    found = {role: data for role, data in _rebuilt().items() if role.endswith(".json")}
    tokenizer, config, generation = (json.loads(data) for data in found.values())
    assert tokenizer["model"]["vocab"] == {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3, "<|tool|>": 4}
    assert [(t["id"], t["content"], t["special"]) for t in tokenizer["added_tokens"]] == [
        (0, "<|endoftext|>", True),
        (4, "<|tool|>", False),
    ]
    assert tokenizer["normalizer"] == {"type": "NFC"}
    assert config["added_tokens_decoder"]["4"]["content"] == "<|tool|>"
    assert config["pad_token"] == config["eos_token"] == "<|endoftext|>"
    assert config["add_bos_token"] is config["add_prefix_space"] is False
    assert generation == {"eos_token_id": 0}
    rust = Tokenizer.from_str(json.dumps(tokenizer))
    assert rust.encode("abba<|tool|>ab").ids == [3, 2, 1, 4, 3]


def test_pre_tokenizers() -> None:
    for pre, has_marks in (("qwen35", True), ("qwen2", False)):
        tokenizer = json.loads(_rebuilt(ggml__pre=pre)["tokenizer.json"])
        split, _ = tokenizer["pre_tokenizer"]["pretokenizers"]
        assert (r"\p{M}" in split["pattern"]["Regex"]) is has_marks
        pieces = Tokenizer.from_str(json.dumps(tokenizer)).pre_tokenizer.pre_tokenize_str("it's 12\n\n x")  # type: ignore[union-attr]
        assert [text for text, _ in pieces] == ["it", "'s", "Ġ", "1", "2", "ĊĊ", "Ġx"]
    tokenizer = json.loads(_rebuilt(ggml__pre="smollm")["tokenizer.json"])
    assert tokenizer["normalizer"] is None
    pieces = Tokenizer.from_str(json.dumps(tokenizer)).pre_tokenizer.pre_tokenize_str("it's 12 x")  # type: ignore[union-attr]
    assert [text for text, _ in pieces] == ["it", "'s", "Ġ", "1", "2", "Ġx"]


def test_end_of_turn_is_a_stop_too() -> None:
    assert json.loads(_rebuilt(ggml__eot_token_id=4)["generation_config.json"]) == {"eos_token_id": [0, 4]}
    assert json.loads(_rebuilt(ggml__eot_token_id=0)["generation_config.json"]) == {"eos_token_id": 0}


def test_beginning_token() -> None:
    config = json.loads(_rebuilt(ggml__add_bos_token=True, ggml__bos_token_id=4)["tokenizer_config.json"])
    assert config["add_bos_token"] is True
    assert config["bos_token"] == "<|tool|>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml__model": "llama"}, "tokenizer of the kind 'llama'"),
        ({"ggml__pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe'; supported are qwen35, qwen2, smollm"),
        ({"ggml__pre": None}, "pre-tokenizer None"),
        ({"ggml__tokens": None}, "lacks a list 'tokenizer.ggml.tokens'"),
        ({"ggml__merges": [1]}, "lacks a list 'tokenizer.ggml.merges'"),
        ({"ggml__token_type": [1]}, "7 tokens, but 1 token types"),
        ({"ggml__token_type": [3, 6, 1, 1, 4, 5, 5]}, "token 1 .'a'. of m.gguf has the type 6"),
        ({"ggml__token_type": [3, 5, 1, 1, 4, 5, 5]}, "token 1 .'a'. of m.gguf has the type 5"),
        ({"ggml__tokens": ["a"] * 7}, "two tokens alike"),
        ({"ggml__eos_token_id": 5}, "outside the 5 tokens"),
        ({"ggml__eos_token_id": None}, "names no end token"),
        ({"chat_template": None}, "no chat template"),
    ],
)
def test_vocabularies_that_cannot_be_used(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        _rebuilt(**changes)


def test_given_files_replace_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("mine")
    found = _rebuilt({"chat_template.jinja": tmp_path / "mine.jinja"}, chat_template=None)
    assert found["chat_template.jinja"] == b"mine"
    with pytest.raises(ConversionError, match=r"unknown resource role 'vocab\.json'"):
        _rebuilt({"vocab.json": tmp_path / "mine.jinja"})
    with pytest.raises(ConversionError, match="none cannot be read"):
        _rebuilt({"chat_template.jinja": tmp_path / "none"})


@pytest.mark.skipif(not REAL.exists(), reason="needs the model that `make demo` fetches")
def test_the_real_tokenizer() -> None:
    file = GgufFile.open(REAL)
    tokenizer = Tokenizer.from_str(resources.from_gguf(file, {})["tokenizer.json"].decode())
    text = "Hello, world! It's 2024.\n\tdef f(x): return x ** 2  # naïve 你好 🙂"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>user").ids == [1, 4093]
    assert tokenizer.encode("2024").ids == [tokenizer.token_to_id(digit) for digit in "2024"]
    assert tokenizer.get_vocab_size() == 49152
    file.data.close()


# folders


def _folder(tmp_path: Path) -> Path:
    tiny.write_resources(tmp_path)
    return tmp_path


def test_folder_resources_are_verbatim(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    found = resources.from_folder(folder, {}, {})
    assert list(found) == list(resources.TEXT_ROLES)
    assert found["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert found["chat_template.jinja"] == b"{{ messages }}"
    (folder / "chat_template.jinja").write_text("file wins")
    assert resources.from_folder(folder, {}, {})["chat_template.jinja"] == b"file wins"


def test_template_lists(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert resources.from_folder(folder, {}, {})["chat_template.jinja"] == b"d"


@pytest.mark.parametrize("role", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_missing_resources_are_named(tmp_path: Path, role: str) -> None:
    folder = _folder(tmp_path)
    (folder / role).unlink()
    (folder / "chat_template.jinja").write_text("x")
    with pytest.raises(
        ConversionError, match=f"lacks {role}; put it there or name one with --resource {role}=PATH"
    ):
        resources.from_folder(folder, {}, {})


def test_missing_template_is_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConversionError, match=r"lacks chat_template\.jinja"):
        resources.from_folder(folder, {}, {})


def test_stop_ids_of_the_model_config(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "generation_config.json").unlink()
    config = {"text_config": {"eos_token_id": [3, 4]}, "eos_token_id": 5}
    found = resources.from_folder(folder, config, {})
    assert json.loads(found["generation_config.json"]) == {"eos_token_id": [3, 4]}


@pytest.mark.parametrize(
    ("role", "data", "message"),
    [
        ("tokenizer.json", b"", "tokenizer.json is empty"),
        ("tokenizer.json", b"{", "not valid JSON"),
        ("generation_config.json", b"[]", "must be a JSON object"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
    ],
)
def test_bad_resources(tmp_path: Path, role: str, data: bytes, message: str) -> None:
    folder = _folder(tmp_path)
    (folder / role).write_bytes(data)
    with pytest.raises(ConversionError, match=message):
        resources.from_folder(folder, {}, {})
