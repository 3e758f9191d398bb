"""A frontend for the observers; the records that they are told of come from `made`."""

import logging
from collections.abc import Iterator

import pytest

from ninfer.serve.observe.stderr import HANDLER
from tests.frontend.conftest import qwen

__all__ = ["qwen"]


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root, ours, access = (logging.getLogger(name) for name in (None, "ninfer", "uvicorn.access"))
    uvicorn = logging.getLogger("uvicorn.error")
    before = root.level, ours.level, access.disabled, uvicorn.level
    yield
    root.removeHandler(HANDLER)
    root.setLevel(before[0])
    ours.setLevel(before[1])
    access.disabled = before[2]
    uvicorn.setLevel(before[3])
