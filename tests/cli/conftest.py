"""A tiny whole model for the programs."""

from pathlib import Path

import pytest

from tests.frontend.conftest import Documents, _qwen_documents
from tests.models.tiny import Qwen35Geometry
from tests.tiny_artifact import write_artifact


@pytest.fixture(scope="session")
def documents() -> Documents:
    return _qwen_documents()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, documents: Documents) -> Path:
    """A tiny Qwen3.5 artifact; its Hugging Face folder stands beside it as `checkpoint`."""
    return write_artifact(Qwen35Geometry(vocab_size=1024), documents, tmp_path_factory.mktemp("tiny"))
