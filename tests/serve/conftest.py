"""Fixtures of the serving tests: all of them run in asyncio, on a fake engine unless they say otherwise."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
