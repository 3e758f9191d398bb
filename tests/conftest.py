"""Fixtures that several rooms share."""

from pathlib import Path

import pytest

from tests.frontend.conftest import llama_documents, qwen_documents

__all__ = ["llama_documents", "qwen_documents"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no GPU"))


SMOLLM2 = Path(__file__).parent.parent / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file that `make test` fetches."""
    if not SMOLLM2.exists():
        pytest.skip(f"{SMOLLM2.name} is not in models/; make test fetches it")
    return SMOLLM2


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5 artifact; its Hugging Face folder stands beside it as `checkpoint`."""
    from tests.frontend.conftest import _qwen_documents
    from tests.models.tiny import Qwen35Geometry
    from tests.tiny_artifact import write_artifact

    return write_artifact(Qwen35Geometry(vocab_size=1024), _qwen_documents(), tmp_path_factory.mktemp("tiny"))
