"""Two servers that most tests share: ninfer-nano, which calls tools and thinks, and SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.e2e.process import NANO, ServerProcess

RECORDED_MODELS = ("stub-model", "claude-sonnet-4-5-20250929", "claude-opus-4-8", "gpt-5.5", "gpt-5.6-luna")


def nano_options() -> list[str]:
    """Room for the prompts of coding agents. A seed and caps keep answers the same and short."""
    aliases = [word for name in RECORDED_MODELS for word in ("--model-alias", name)]
    options = ["--max-concurrency", "4", "--max-context", "8192", "--kv-capacity", "32768", "--seed", "1"]
    options += ["--presence-penalty", "0", "--prefill-chunk", "256", "--default-max-tokens", "500"]
    return [*options, "--default-thinking-budget", "64", *aliases]


@pytest.fixture(scope="package")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(NANO, tmp_path_factory.mktemp("nano"), *nano_options()) as server:
        yield server


@pytest.fixture(scope="package")
def smol(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Converted from GGUF at its first start, into the cache where other tests find it too."""
    options = ["--max-concurrency", "2", "--max-context", "2048", "--kv-capacity", "4096"]
    with ServerProcess(smollm2, tmp_path_factory.mktemp("smol"), *options) as server:
        yield server
