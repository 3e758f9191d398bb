"""Fixtures that several rooms share."""

from pathlib import Path

import pytest

from tests.frontend.conftest import llama_documents, qwen_documents

__all__ = ["llama_documents", "qwen_documents"]

SMOLLM2 = Path(__file__).parent.parent / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file that `make test` fetches."""
    if not SMOLLM2.exists():
        pytest.skip(f"{SMOLLM2.name} is not in models/; make test fetches it")
    return SMOLLM2
