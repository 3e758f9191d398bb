"""Tokenizer files, chat template and generation config from the `tokenizer.*` keys of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ninfer.convert.gguf_file import GgufFile
from ninfer.errors import ConversionError

_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _QWEN35.replace(r"[\p{L}\p{M}]+", r"\p{L}+").replace(r"\p{M}", "")


def rebuild(file: GgufFile, roles: Sequence[str]) -> dict[str, bytes]:
    """The wanted text resources, role -> bytes."""
    vocabulary = _Vocabulary(file)
    makers = {
        "tokenizer.json": vocabulary.tokenizer,
        "tokenizer_config.json": vocabulary.tokenizer_config,
        "chat_template.jinja": vocabulary.template,
        "generation_config.json": vocabulary.generation_config,
    }
    return {role: makers[role]() for role in roles}


class _Vocabulary:
    """Tokens, types and ids of one file, checked."""

    def __init__(self, file: GgufFile) -> None:
        self._keys: Mapping[str, Any] = file.keys
        self._path = file.path
        model = self._keys.get("tokenizer.ggml.model")
        if model != "gpt2":
            raise ConversionError(
                f"{file.path} has a tokenizer of the kind {model!r}; only 'gpt2' (byte-level BPE) is "
                "supported"
            )
        tokens = self._list("tokens", str)
        types = self._list("token_type", int)
        if len(types) != len(tokens):
            raise ConversionError(f"{file.path} has {len(tokens)} tokens, but {len(types)} token types")
        public = max((i + 1 for i, kind in enumerate(types) if kind != _UNUSED), default=0)
        self.tokens = tokens[:public]
        self.types = types[:public]
        for index, kind in enumerate(self.types):
            if kind not in (_NORMAL, _CONTROL, _USER):
                raise ConversionError(
                    f"token {index} ({tokens[index]!r}) of {file.path} has the type {kind}; normal (1), "
                    "control (3) and "
                    f"user-defined (4) tokens are supported"
                )

    def tokenizer(self) -> bytes:
        vocab = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(vocab) != len(self.tokens):
            raise ConversionError(f"{self._path} spells two tokens alike; its vocabulary cannot be used")
        normalizer, pre_tokenizer = self._pipeline()
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        document = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": index, **token} for index, token in self._added().items()],
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": self._list("merges", str),
            },
        }
        return _json(document)

    def tokenizer_config(self) -> bytes:
        document: dict[str, Any] = {
            "add_bos_token": bool(self._keys.get("tokenizer.ggml.add_bos_token", False)),
            "add_prefix_space": False,
            "added_tokens_decoder": {str(index): token for index, token in self._added().items()},
        }
        for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
            index = self._id(key)
            if index is not None:
                document[name] = self.tokens[index]
        template = self._keys.get("tokenizer.chat_template")
        if template is not None:
            document["chat_template"] = template
        return _json(document)

    def template(self) -> bytes:
        template = self._keys.get("tokenizer.chat_template")
        if not isinstance(template, str) or not template:
            raise ConversionError(
                f"{self._path} has no chat template (tokenizer.chat_template); name one with --resource "
                "chat_template.jinja=PATH"
            )
        return template.encode()

    def generation_config(self) -> bytes:
        ids = [index for index in (self._id("eos"), self._id("eot")) if index is not None]
        if not ids:
            raise ConversionError(
                f"{self._path} names no end token (tokenizer.ggml.eos_token_id); give --resource "
                "generation_config.json=PATH"
            )
        unique = list(dict.fromkeys(ids))
        return _json({"eos_token_id": unique[0] if len(unique) == 1 else unique})

    def _added(self) -> dict[int, dict[str, Any]]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return {
            index: {"content": token, **flags, "special": kind == _CONTROL}
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind != _NORMAL
        }

    def _pipeline(self) -> tuple[Any, Any]:
        """Normalizer and pre-tokenizer by the file's name for them."""
        pre = self._keys.get("tokenizer.ggml.pre")
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        if pre == "smollm":
            digits = {"type": "Digits", "individual_digits": True}
            return None, {"type": "Sequence", "pretokenizers": [digits, {**byte_level, "use_regex": True}]}
        patterns = {"qwen35": _QWEN35, "qwen2": _QWEN2}
        if pre not in patterns:
            known = ", ".join((*patterns, "smollm"))
            raise ConversionError(f"{self._path} has the pre-tokenizer {pre!r}; supported are {known}")
        split = {
            "type": "Split",
            "pattern": {"Regex": patterns[pre]},
            "behavior": "Isolated",
            "invert": False,
        }
        return {"type": "NFC"}, {
            "type": "Sequence",
            "pretokenizers": [split, {**byte_level, "use_regex": False}],
        }

    def _id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        index = self._keys.get(key)
        if index is None:
            return None
        if type(index) is not int or not 0 <= index < len(self.tokens):
            raise ConversionError(
                f"'{key}' of {self._path} is {index!r}, outside the {len(self.tokens)} tokens"
            )
        return index

    def _list(self, name: str, kind: type) -> list[Any]:
        values = self._keys.get(f"tokenizer.ggml.{name}")
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise ConversionError(
                f"{self._path} lacks a list 'tokenizer.ggml.{name}'; its tokenizer cannot be rebuilt"
            )
        return values


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
