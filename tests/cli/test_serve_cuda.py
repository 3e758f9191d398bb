"""A server on a GPU: streamed answers of several clients at a time are those of the engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ninfer.api import Engine, EngineOptions, GenerationOptions

httpx = pytest.importorskip("httpx")
for needed in ("fastapi", "uvicorn", "orjson"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parents[2]
NANO = Path(os.environ.get("MODELS", ROOT / "models")).expanduser() / "ninfer-nano.ninfer"
START = 120.0
QUESTIONS = [f"What is {a} + {b}?" for a, b in ((17, 25), (2718, 3141), (79, 325), (4, 9))]
GREEDY = GenerationOptions(max_new=48, temperature=0.0, presence_penalty=0.0, thinking=False)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not NANO.exists(), reason="no ninfer-nano"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log"
    options = ["--port", "0", "--device", "cuda", "--max-concurrency", "4", "--max-context", "2048"]
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "ninfer.cli.serve", str(NANO), *options, "--kv-capacity", "8192"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=dict(os.environ, PYTHONPATH=os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))),
            cwd=log.parent,
        )
    try:
        end = time.monotonic() + START
        while not (found := re.search(r"Anthropic clients +base URL (\S+)", log.read_text("utf-8"))):
            assert server.poll() is None, log.read_text("utf-8")
            assert time.monotonic() < end, log.read_text("utf-8")
            time.sleep(0.05)
        assert "cuda" in log.read_text("utf-8")
        yield found.group(1)
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def streamed(url: str, question: str) -> str:
    body = {
        "model": "ninfer-nano",
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 48,
        "presence_penalty": 0,
        "reasoning_effort": "none",
    }
    pieces = []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    pieces.append(choice["delta"].get("content") or "")
    return "".join(pieces)


def test_answers_of_clients(url: str) -> None:
    with Engine.load(NANO, EngineOptions(device="cuda", max_context=2048)) as engine:
        wanted = [engine.chat([{"role": "user", "content": q}], GREEDY).text() for q in QUESTIONS]
    assert [streamed(url, question) for question in QUESTIONS] == wanted
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda question: streamed(url, question), QUESTIONS * 4)) == wanted * 4
    assert "42" in wanted[0]
