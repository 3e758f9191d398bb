"""`truncation: auto`: the oldest turns are left out of a prompt that is too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ninfer.serve.errors import ApiError
from ninfer.serve.responses.items import Json
from ninfer.serve.responses.request import Create

if TYPE_CHECKING:
    from ninfer.serve.server import Server


async def fitted(create: Create, server: Server) -> Create:
    """The request with as many of its latest turns as leave room for an answer, its beginning (system
    texts, tools) kept. A last turn that is too long by itself stays, to be refused."""
    context = server.link.info.max_context
    output = create.generation.max_output
    output = server.options.default_max_tokens if output is None else output
    room = context - min(output, context // 4)

    async def fits(candidate: Create) -> bool:
        return await server.service.count(candidate.generation) <= room

    if await fits(create):
        return create
    cuts = candidates(create.history)
    low, high = 0, len(cuts) - 1  # the least cut that fits lies in cuts[low..high], or nothing fits
    best = create
    while low <= high:
        middle = (low + high) // 2
        try:
            shorter = create.shortened(cuts[middle])
            fit = await fits(shorter)
        except ApiError:  # the cut went between a call and its late output
            shorter, fit = best, False
        if fit:
            best, high = shorter, middle - 1
        else:
            low = middle + 1
    return best


def candidates(history: tuple[Json, ...]) -> list[tuple[Json, ...]]:
    """Shorter histories, longest first: the beginning, and what follows from each user message but the
    first on."""
    head = 0
    while head < len(history) and _opens(history[head]):
        head += 1
    starts = [i for i, item in enumerate(history) if i > head and item.get("role") == "user"]
    return [(*history[:head], *history[start:]) for start in starts]


def _opens(item: Json) -> bool:
    return item["type"] == "additional_tools" or item.get("role") in ("system", "developer")
