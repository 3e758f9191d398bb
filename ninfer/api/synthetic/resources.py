"""The text resources of a synthetic model: single bytes encode, made-up words decode; a plain template."""

from __future__ import annotations

import itertools
import json
from typing import Any

from ninfer.frontend.tokenizer import QWEN_REGEX

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_HIDDEN = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_VISIBLE = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
_LAST = (
    "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<tts_text_bos_single>", "<|audio_pad|>",
)  # fmt: skip
_QWEN_ADDED = [*((t, True) for t in _HIDDEN), *((t, False) for t in _VISIBLE), *((t, True) for t in _LAST)]
_LLAMA_ADDED = [("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True)]
_SYLLABLES = ["".join(pair) for pair in itertools.product("bdfgklmnprstvwxz", "aeiou")]


def make(public_tokens: int, *, is_llama: bool) -> dict[str, bytes]:
    """Role to bytes. Ids are 0..`public_tokens` - 1, at least 300 of them.

    Qwen: bytes, words, and the 33 control tokens last and in their order, so that with 248,077 ids each has
    its public id. Llama: three control tokens first. No text is ever encoded as a word.
    """
    added = _LLAMA_ADDED if is_llama else _QWEN_ADDED
    spelled = _alphabet() + _words(public_tokens - 256 - len(added))
    first = 0 if is_llama else len(spelled)
    begin = len(added) if is_llama else 0
    vocabulary = {token: begin + i for i, token in enumerate(spelled)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN_REGEX}, "behavior": "Isolated", "invert": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(first + i, token, special) for i, (token, special) in enumerate(added)],
        "normalizer": None if is_llama else {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    config = {"add_bos_token": False, "add_prefix_space": False, "bos_token": None}
    config |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
        "generation_config.json": json.dumps({"eos_token_id": [first + 2, first]}).encode(),
    }


def _added(token_id: int, content: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": special}


def _alphabet() -> list[str]:
    """How byte-level BPE writes each byte: printable Latin-1 as it is, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _words(count: int) -> list[str]:
    """Different words of two syllables, then of three, each with a space in front (in BPE's spelling)."""
    short = itertools.product(_SYLLABLES, repeat=2)
    long = itertools.product(_SYLLABLES, repeat=3)
    return ["\u0120" + "".join(word) for word in itertools.islice(itertools.chain(short, long), count)]
