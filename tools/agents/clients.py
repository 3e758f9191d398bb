"""How each agent is set up, started without a screen, and what its events say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where an agent lives during a test: its home, the server's address without /v1, key, model, window."""

    home: Path
    url: str
    key: str
    model: str
    context: int


@dataclass
class Heard:
    """What an agent reported of one turn: outputs of its tools, its last text, its errors."""

    outputs: list[str] = field(default_factory=list)
    text: str = ""
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Client:
    """`setup` writes settings and gives the environment; `command` is the first turn's or a later one's.

    `model` is a name that changes what the agent sends (None: one that it doesn't know). `reused`: the part
    of the session's first prompt that each later request must find in the prefix cache. `also`: one of the
    further ways to use an agent that is in the list already.
    """

    name: str
    setup: Callable[[Place], dict[str, str]]
    command: Callable[[str, bool], list[str]]
    hear: Callable[[Iterable[Event]], Heard]
    model: str | None = None
    reused: float = 0.95
    also: bool = False


def _claude_setup(place: Place) -> dict[str, str]:
    return {
        "CLAUDE_CONFIG_DIR": str(place.home / ".claude"),
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_AUTH_TOKEN": place.key,
        "ANTHROPIC_MODEL": place.model,
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _claude_command(prompt: str, again: bool) -> list[str]:
    options = ["--output-format", "stream-json", "--verbose", "--allowedTools", "Bash"]
    return ["claude", "-p", prompt, *(["--continue"] if again else []), *options]


def _claude_hear(events: Iterable[Event]) -> Heard:
    heard = Heard()
    for event in events:
        if event["type"] == "user":
            content = event["message"]["content"]
            blocks = content if isinstance(content, list) else []
            results = [block for block in blocks if block.get("type") == "tool_result"]
            heard.outputs += [_text(block.get("content")) for block in results]
            heard.errors += [_text(block.get("content")) for block in results if block.get("is_error")]
        elif event["type"] == "result":
            heard.text = event.get("result") or ""
            if event.get("is_error"):
                heard.errors.append(f"{event.get('subtype')}: {heard.text or event.get('error')}")
    return heard


def _codex_setup(place: Place) -> dict[str, str]:
    folder = place.home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        f'model = "{place.model}"\n'
        'model_provider = "local"\n'
        f"model_context_window = {place.context}\n"
        "check_for_update_on_startup = false\n"
        "[analytics]\nenabled = false\n"
        "[model_providers.local]\n"
        f'name = "local"\nbase_url = "{place.url}/v1"\nenv_key = "LOCAL_KEY"\nwire_api = "responses"\n'
    )
    return {"CODEX_HOME": str(folder), "LOCAL_KEY": place.key}


def _codex_command(prompt: str, again: bool) -> list[str]:
    options = ["--json", "--skip-git-repo-check"]
    return ["codex", "exec", *options, *(["resume", "--last"] if again else []), prompt]


def _codex_hear(events: Iterable[Event]) -> Heard:
    heard = Heard()
    for event in events:
        item = event.get("item") or {}
        if event["type"] == "item.completed" and item.get("type") == "command_execution":
            heard.outputs.append(item.get("aggregated_output") or "")
        elif event["type"] == "item.completed" and item.get("type") == "agent_message":
            heard.text = item["text"]
        elif event["type"] in ("error", "turn.failed"):
            heard.errors.append(str(event.get("message") or event.get("error")))
    return heard


def _opencode_setup(package: str, place: Place) -> dict[str, str]:
    model = f"local/{place.model}"
    limit = {"context": place.context, "output": 32000}
    config = {
        "autoupdate": False,
        "share": "disabled",
        "model": model,
        "small_model": model,
        "enabled_providers": ["local"],
        "permission": {"bash": "allow"},
        "provider": {
            "local": {
                "npm": package,
                "options": {"baseURL": f"{place.url}/v1", "apiKey": place.key},
                "models": {place.model: {"tool_call": True, "limit": limit}},
            }
        },
    }
    file = place.home / "opencode.json"
    file.write_text(json.dumps(config))
    folders = {
        f"XDG_{kind}_HOME": str(place.home / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE", "STATE")
    }
    disabled = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    return {"OPENCODE_CONFIG": str(file), **folders, **{f"OPENCODE_DISABLE_{name}": "1" for name in disabled}}


def _opencode_command(prompt: str, again: bool) -> list[str]:
    return ["opencode", "run", "--format", "json", *(["--continue"] if again else []), prompt]


def _opencode_hear(events: Iterable[Event]) -> Heard:
    heard = Heard()
    for event in events:
        part = event.get("part") or {}
        if event["type"] == "tool_use":
            heard.outputs.append(part["state"].get("output") or "")
            if part["state"]["status"] != "completed":
                heard.errors.append(f"tool {part.get('tool')}: {part['state'].get('error')}")
        elif event["type"] == "text":
            heard.text = part["text"]
        elif event["type"] == "error":
            heard.errors.append(json.dumps(event.get("error")))
    return heard


def _qwen_setup(api: str, place: Place) -> dict[str, str]:
    folder = place.home / ".qwen"
    folder.mkdir()
    settings = {
        "general": {"enableAutoUpdate": False, "disableAutoUpdate": True, "disableUpdateNag": True},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "security": {"auth": {"selectedType": api}},
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    return {
        f"{api.upper()}_BASE_URL": f"{place.url}/v1" if api == "openai" else place.url,
        f"{api.upper()}_API_KEY": place.key,
        f"{api.upper()}_MODEL": place.model,
        "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
    }


def _qwen_command(prompt: str, again: bool) -> list[str]:
    options = ["--output-format", "stream-json", "--yolo", "-p", prompt]
    return ["qwen", *(["--continue"] if again else []), *options]


def _text(content: Any) -> str:
    """The text of a tool result: a string, or a list of blocks."""
    if isinstance(content, list):
        return "\n".join(block.get("text", "") for block in content)
    return content or ""


_CLAUDE = Client("claude-code", _claude_setup, _claude_command, _claude_hear)
_CODEX = Client("codex", _codex_setup, _codex_command, _codex_hear)
_OPENCODE = Client(
    "opencode", partial(_opencode_setup, "@ai-sdk/openai-compatible"), _opencode_command, _opencode_hear
)
# Its events have Claude Code's form. In the second turn it moves a note out of the first message, so that a
# recurrent model has to start again at the end of the system message.
_QWEN = Client("qwen-code", partial(_qwen_setup, "openai"), _qwen_command, _claude_hear, reused=0.85)

CLIENTS = (
    _CLAUDE,
    replace(_CLAUDE, name="claude-code-sonnet", model="claude-sonnet-4-5-20250929", also=True),
    replace(_CLAUDE, name="claude-code-opus", model="claude-opus-4-8", also=True),
    _CODEX,
    replace(_CODEX, name="codex-gpt-5.5", model="gpt-5.5", also=True),
    replace(_CODEX, name="codex-gpt-5.6", model="gpt-5.6-luna", also=True),
    _OPENCODE,
    replace(
        _OPENCODE, name="opencode-responses", setup=partial(_opencode_setup, "@ai-sdk/openai"), also=True
    ),
    replace(
        _OPENCODE, name="opencode-messages", setup=partial(_opencode_setup, "@ai-sdk/anthropic"), also=True
    ),
    _QWEN,
    replace(_QWEN, name="qwen-code-messages", setup=partial(_qwen_setup, "anthropic"), also=True),
)
