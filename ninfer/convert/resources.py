"""The text resources of an artifact: found in a Hugging Face folder, or rebuilt from a GGUF file's keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ninfer.convert import gguf_tokenizer
from ninfer.convert.gguf_file import GgufFile
from ninfer.convert.safetensors_source import read_object
from ninfer.errors import ConversionError

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
TEXT_ROLES = (TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, GENERATION)


def from_folder(folder: Path, config: Mapping[str, Any], given: Mapping[str, Path]) -> dict[str, bytes]:
    """Role -> bytes of the four text resources; `given` files win over the folder's."""
    makers: dict[str, Callable[[], bytes | None]] = {
        TEMPLATE: lambda: _template_in_config(folder / TOKENIZER_CONFIG),
        GENERATION: lambda: _generation_from_config(config),
    }
    found = {}
    for role in TEXT_ROLES:
        path = given.get(role, folder / role)
        if role in given or path.is_file():
            found[role] = _read(path)
            continue
        made = makers.get(role, lambda: None)()
        if made is None:
            raise ConversionError(
                f"{folder} lacks {role}; put it there or name one with --resource {role}=PATH"
            )
        found[role] = made
    return _checked(found, given)


def from_gguf(file: GgufFile, given: Mapping[str, Path]) -> dict[str, bytes]:
    """Role -> bytes of the four text resources, rebuilt from the file's keys where no file is given."""
    needed = [role for role in TEXT_ROLES if role not in given]
    rebuilt = gguf_tokenizer.rebuild(file, needed) if needed else {}
    found = {role: _read(given[role]) if role in given else rebuilt[role] for role in TEXT_ROLES}
    return _checked(found, given)


def _template_in_config(path: Path) -> bytes | None:
    if not path.is_file():
        return None
    template = read_object(path).get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template.encode() if isinstance(template, str) and template else None


def _generation_from_config(config: Mapping[str, Any]) -> bytes | None:
    """A minimal generation config from the model config's stop ids."""
    text = config.get("text_config")
    for level in (text if isinstance(text, Mapping) else {}, config):
        ids = level.get("eos_token_id")
        if ids is not None:
            return json.dumps({"eos_token_id": ids}).encode()
    return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConversionError(f"the resource {path} cannot be read: {error.strerror or error}") from None


def _checked(found: dict[str, bytes], given: Mapping[str, Path]) -> dict[str, bytes]:
    unknown = sorted(set(given) - set(TEXT_ROLES))
    if unknown:
        raise ConversionError(f"unknown resource role '{unknown[0]}'; known are {', '.join(TEXT_ROLES)}")
    for role, data in found.items():
        if not data:
            raise ConversionError(f"the resource {role} is empty")
        try:
            text = data.decode()
            if role.endswith(".json") and not isinstance(json.loads(text), dict):
                raise ConversionError(f"the resource {role} must be a JSON object")
        except UnicodeDecodeError as error:
            raise ConversionError(f"the resource {role} is not UTF-8 (byte {error.start})") from None
        except ValueError as error:
            raise ConversionError(f"the resource {role} is not valid JSON: {error}") from None
    return found
