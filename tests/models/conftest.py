from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny models gain nothing from threads, and wait for each other on a busy machine."""
    before = torch.get_num_threads()
    if "smollm2" not in request.module.__name__:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
