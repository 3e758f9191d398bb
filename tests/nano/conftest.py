"""ninfer-nano as it ships, and the weight profiles made of it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ninfer.api import Engine, EngineOptions
from ninfer.convert import convert
from tools.nano.rebuild import COMPONENTS, rebuild

from .asking import NANO


@pytest.fixture(scope="package", autouse=True)
def threads() -> Iterator[None]:
    """Engines here take one thread, so that tests cost the same beside other work; others get theirs back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def engine(threads: None) -> Iterator[Engine]:
    """The shipped artifact, one request at a time."""
    with Engine.load(NANO, EngineOptions(max_context=8192, threads=1)) as engine:
        yield engine


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face folder rebuilt from the shipped artifact."""
    path = tmp_path_factory.mktemp("nano") / "reference"
    rebuild(NANO, path)
    return path


@pytest.fixture(scope="package")
def profile(folder: Path) -> Callable[[str], Path]:
    """Recipe -> artifact, converted from the rebuilt folder when first asked for."""

    def make(recipe: str) -> Path:
        out = folder.parent / f"{recipe}.ninfer"
        if not out.exists():
            convert(folder, out, recipe=recipe, components=COMPONENTS)
        return out

    return make
