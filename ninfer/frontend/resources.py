"""The four text resources of an artifact, read and checked before anything is built from them.

Rules: spec of the artifact, "Resources". Every failure is a FrontendError naming the resource and the rule.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ninfer.errors import FrontendError

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
ROLES = (TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, GENERATION_CONFIG)

MAX_TOKEN_ID = 1_000_000
SPECIAL_TOKEN_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_FLAGS = ("single_word", "lstrip", "rstrip")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token outside the byte-pair vocabulary. `special` ones are hidden from the answer."""

    id: int
    content: str
    special: bool


@dataclass(frozen=True, slots=True)
class TextResources:
    """Checked resources.

    `tokenizer` is the parsed tokenizer.json, `added` all added tokens of both files by id, `public_tokens`
    the number of ids (0..public_tokens-1), `stop_token_ids` the model's defaults, `special_tokens` the texts
    of the named special tokens that tokenizer_config.json gives, `template` the chat template's source.
    """

    tokenizer: dict[str, Any]
    added: dict[int, AddedToken]
    public_tokens: int
    stop_token_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    template: str


def read_resources(resources: Mapping[str, bytes], *, qwen: bool, vocab_rows: int) -> TextResources:
    """Decode and check everything. `qwen` adds the rules that hold for Qwen architectures only."""
    texts = {role: _text(resources, role) for role in ROLES}
    tokenizer = _json_object(texts[TOKENIZER], TOKENIZER)
    config = _json_object(texts[TOKENIZER_CONFIG], TOKENIZER_CONFIG)
    generation = _json_object(texts[GENERATION_CONFIG], GENERATION_CONFIG)
    added = _added_tokens(tokenizer, config, qwen=qwen)
    public = _count_tokens(tokenizer, added, vocab_rows)
    special = _special_tokens(config)
    if qwen:
        _check_qwen_config(config, special)
    stops = _stop_token_ids(generation, public)
    return TextResources(tokenizer, added, public, stops, special, texts[CHAT_TEMPLATE])


def _text(resources: Mapping[str, bytes], role: str) -> str:
    data = resources.get(role)
    if data is None:
        raise FrontendError(f"The artifact lacks the resource {role}; convert the model again.")
    if not data:
        raise FrontendError(f"The resource {role} is empty.")
    try:
        return bytes(data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FrontendError(f"The resource {role} is not UTF-8 (byte {error.start}).") from error


def _json_object(text: str, role: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrontendError(f"The resource {role} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise FrontendError(f"The resource {role} must be a JSON object, not {type(value).__name__}.")
    return value


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID


def _added_tokens(tokenizer: dict[str, Any], config: dict[str, Any], *, qwen: bool) -> dict[int, AddedToken]:
    entries: list[tuple[str, Any, Any]] = []
    listed = tokenizer.get("added_tokens") or []
    if not isinstance(listed, list):
        raise FrontendError(f"{TOKENIZER}: added_tokens must be an array.")
    for entry in listed:
        entries.append((TOKENIZER, entry.get("id") if isinstance(entry, dict) else None, entry))
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise FrontendError(f"{TOKENIZER_CONFIG}: added_tokens_decoder must be an object.")
    for key, entry in decoder.items():
        entries.append((TOKENIZER_CONFIG, int(key) if key.isascii() and key.isdigit() else None, entry))

    flags = (*_FLAGS, "normalized") if qwen else _FLAGS
    added: dict[int, AddedToken] = {}
    ids: dict[str, int] = {}
    for source, token_id, entry in entries:
        if not _is_id(token_id):
            raise FrontendError(f"{source}: an added token lacks an id in 0..{MAX_TOKEN_ID}.")
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content:
            raise FrontendError(f"{source}: added token {token_id} has no content.")
        raised = [flag for flag in flags if entry.get(flag)]
        if raised:
            raise FrontendError(
                f"{source}: added token {content!r} sets {raised[0]}, which is not supported (must be false)."
            )
        token = AddedToken(token_id, content, bool(entry.get("special", False)))
        other = added.setdefault(token_id, token)
        if other != token:
            raise FrontendError(
                f"{TOKENIZER} and {TOKENIZER_CONFIG} disagree about token {token_id}: "
                f"{other.content!r} (special={other.special}) and {content!r} (special={token.special})."
            )
        if ids.setdefault(content, token_id) != token_id:
            raise FrontendError(f"{source}: {content!r} has two ids, {ids[content]} and {token_id}.")
    return added


def _count_tokens(tokenizer: dict[str, Any], added: dict[int, AddedToken], vocab_rows: int) -> int:
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict) or not vocab:
        raise FrontendError(f"{TOKENIZER}: model.vocab must be a non-empty object.")
    if set(map(type, vocab.values())) != {int}:
        raise FrontendError(f"{TOKENIZER}: every id of model.vocab must be an integer.")
    ids = set(vocab.values())
    if len(ids) != len(vocab):
        raise FrontendError(f"{TOKENIZER}: two entries of model.vocab share an id.")
    for token in added.values():
        known = vocab.get(token.content, token.id)
        if known != token.id:
            raise FrontendError(
                f"{TOKENIZER}: {token.content!r} is id {known} in model.vocab but added as {token.id}."
            )
    clashes = [t for t in added.values() if t.id in ids and t.content not in vocab]
    if clashes:
        raise FrontendError(
            f"{TOKENIZER}: id {clashes[0].id} belongs to an entry of model.vocab and to the added token "
            f"{clashes[0].content!r}."
        )
    ids.update(added)
    low, high = min(ids), max(ids)
    if low < 0 or high > MAX_TOKEN_ID:
        raise FrontendError(f"{TOKENIZER}: token ids must lie in 0..{MAX_TOKEN_ID}; {low}..{high} found.")
    if high + 1 != len(ids):
        gap = next(i for i in range(high + 1) if i not in ids)
        raise FrontendError(f"{TOKENIZER}: token ids must be contiguous from 0; id {gap} is missing.")
    if len(ids) > vocab_rows:
        raise FrontendError(
            f"{TOKENIZER} defines {len(ids)} tokens, but the model's embedding has only {vocab_rows} rows."
        )
    return len(ids)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    special = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise FrontendError(f"{TOKENIZER_CONFIG}: {name} must be a string.")
        special[name] = value
    return special


def _check_qwen_config(config: dict[str, Any], special: dict[str, str]) -> None:
    for name in ("add_bos_token", "add_prefix_space"):
        if config.get(name):
            raise FrontendError(f"{TOKENIZER_CONFIG}: {name} must be false for a Qwen model.")
    pad = special.get("pad_token")
    if pad != "<|endoftext|>":
        raise FrontendError(
            f"{TOKENIZER_CONFIG}: pad_token must be '<|endoftext|>' for a Qwen model, not {pad!r}."
        )


def _stop_token_ids(generation: dict[str, Any], public: int) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    given = value if isinstance(value, list) else [value]
    ids = [i for i in given if type(i) is int]
    if not ids or len(ids) != len(given):
        raise FrontendError(
            f"{GENERATION_CONFIG}: eos_token_id must be an integer or a non-empty array of integers."
        )
    for token_id in ids:
        if not 0 <= token_id < public:
            raise FrontendError(
                f"{GENERATION_CONFIG}: eos_token_id {token_id} is outside the tokenizer's 0..{public - 1}."
            )
    return tuple(dict.fromkeys(ids))
