"""Pages of a stored response's input items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ninfer.serve.errors import ApiError, invalid
from ninfer.serve.fields import spelled
from ninfer.serve.responses.items import Json

_IMAGES = "message.input_image.image_url"


def listed(items: Sequence[Json], query: Iterable[tuple[str, str]]) -> Json:
    """One page as the API shows it. Query: `after` (an item's id), `limit` 1..100 (20), `order` asc or desc
    (desc), `include`. Raises ApiError `invalid_pagination`, `include_not_supported`, `unknown_parameter`."""
    after, limit, order, images = None, 20, "desc", False
    for name, value in query:
        match name.removesuffix("[]"):
            case "after":
                after = value
            case "limit":
                if not (value.isascii() and value.isdecimal()) or not 1 <= int(value[:9]) <= 100:
                    raise _wrong("limit", f"must be a whole number from 1 to 100, not {spelled(value)}")
                limit = int(value)
            case "order":
                if value not in ("asc", "desc"):
                    raise _wrong("order", f"must be asc or desc, not {spelled(value)}")
                order = value
            case "include":
                if value != _IMAGES:
                    raise invalid(f"include can't be {spelled(value)}.", "include", "include_not_supported")
                images = True
            case _:
                raise invalid(f"Unknown parameter: {name[:80]!r}.", name[:80], "unknown_parameter")
    rows = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        ids = [item["id"] for item in rows]
        if after not in ids:
            raise _wrong("after", f"names no item of this response: {spelled(after)}")
        rows = rows[ids.index(after) + 1 :]
    page = rows[:limit]
    return {
        "object": "list",
        "data": page if images else [_without_images(item) for item in page],
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(rows) > limit,
    }


def _without_images(value: Any) -> Any:
    """The same without the URLs (and so the data) of images, however deep."""
    if isinstance(value, list):
        return [_without_images(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    image = value.get("type") == "input_image"
    return {
        name: None if image and name == "image_url" else _without_images(entry)
        for name, entry in value.items()
    }


def _wrong(param: str, what: str) -> ApiError:
    return invalid(f"{param} {what}.", param, "invalid_pagination")
