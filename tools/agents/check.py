"""One agent's session of two turns against a running server, and what must be true of it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.agents.clients import Client, Event, Heard, Place
from tools.agents.relay import Exchange

PROMPTS = ("List the files here, read notes.txt and say done.", "Do it again and say done.")
_NOWHERE = "http://127.0.0.1:9"
"""A proxy that isn't there: what an agent sends elsewhere than to the server fails at once."""


@dataclass(frozen=True)
class Check:
    """Something that must be true, and what was found."""

    name: str
    passed: bool
    found: str


def run_turns(client: Client, place: Place, work: Path, programs: Path, seconds: float) -> list[Check]:
    """Both turns; `work` is the folder in which the agent runs, `programs` holds its program."""
    environment = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(place.home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), _NOWHERE),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
        **client.setup(place),
    }
    checks = []
    for turn, prompt in enumerate(PROMPTS):
        name, word = f"turn{turn + 1}", f"word-{secrets.token_hex(4)}"
        # Nobody can know the word without the tool; names of files are in some agents' prompts.
        (work / "notes.txt").write_text(f"{word}\n")
        code, out = _run(client.command(prompt, turn > 0), work, environment, place.home / name, seconds)
        checks += judge(f"turn {turn + 1}", word, code, client.hear(read_events(out)))
    return checks


def judge(turn: str, word: str, code: int | None, heard: Heard) -> list[Check]:
    """What a turn must have brought; `word` was there to be read, `code` is None after a timeout."""
    read = any(word in output for output in heard.outputs)
    answered = "done" in heard.text and word in heard.text
    ended = "; ".join([f"exit code {code}", *heard.errors])
    outputs = f"{len(heard.outputs)} outputs{'' if read else f' without {word}'}"
    return [
        Check(f"{turn}: ends well", code == 0 and not heard.errors, ended),
        Check(f"{turn}: tool ran", read, outputs),
        Check(f"{turn}: answer uses its result", answered, heard.text[:200] or "no text"),
    ]


def judge_http(exchanges: Iterable[Exchange]) -> list[Check]:
    """Every request of the agent was answered, and with success."""
    answers = [answer for exchange in exchanges for answer in exchange.answers()]
    bad = [f"{line} -> {status or 'no answer'}" for line, status in answers if not 200 <= status < 300]
    return [Check("HTTP answers", bool(answers) and not bad, "; ".join(bad) or f"{len(answers)} of 2xx")]


def judge_log(records: list[dict[str, Any]], reused: float) -> list[Check]:
    """What the request log says of the agent's requests: all done, calls parsed, and at least the part
    `reused` of the first prompt found again by the later ones."""
    done = [r for r in records if r["event"] == "request_done"]
    bad = [r["event"] for r in records if r["event"] in ("request_rejected", "request_error")]
    calls = sum(r["result"]["tool_call_count"] for r in done)
    fallbacks = {r["result"]["tool_call_parse"]["fallback_reason"] for r in done} - {"none"}
    # Titles and other side requests have other tools or none, and prompts of their own.
    tools = max((r["request"]["tool_count"] for r in done), default=0)
    turns = [r["result"] for r in done if r["request"]["tool_count"] == tools]
    shares = [r["prefix_cache_hit_tokens"] / turns[0]["prompt_tokens"] for r in turns[1:]]
    prompts = [r["prompt_tokens"] for r in turns]
    cached = [r["prefix_cache_hit_tokens"] for r in turns]
    return [
        Check("requests done", bool(done) and not bad, "; ".join(bad) or f"{len(done)}"),
        Check("tool calls", calls >= len(PROMPTS) and not fallbacks, f"{calls}{''.join(fallbacks)}"),
        Check(
            "prefix reuse",
            len(shares) >= 3 and min(shares) >= reused,
            f"prompts of {prompts} tokens, cached {cached}",
        ),
    ]


def read_events(text: str) -> list[Event]:
    """The JSON objects of a program's output, one a line; other lines are the program's own remarks."""
    events = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "type" in event:
                events.append(event)
    return events


def _run(
    command: list[str], work: Path, environment: dict[str, str], out: Path, seconds: float
) -> tuple[int | None, str]:
    """Exit code (None: it took too long) and standard output, which is kept beside `out` with the errors."""
    with open(f"{out}.jsonl", "wb") as output, open(f"{out}.err", "wb") as errors:
        process = subprocess.Popen(
            command,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what it left in the background
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, Path(f"{out}.jsonl").read_text(errors="replace")
