"""Responses that can be fetched, continued and deleted: in this process, the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import orjson

from ninfer.serve.errors import ApiError, invalid
from ninfer.serve.responses.items import Json


@dataclass(frozen=True)
class Record:
    """A finished response. `items` are those of its request, `history` everything up to and including its
    own output: what a request that continues it begins with."""

    response: Json
    items: tuple[Json, ...]
    history: tuple[Json, ...]
    preserve_thinking: bool | None = None


class Store:
    """At most `max_records` responses of `max_bytes` together (as JSON, histories counted in full).

    Owned by the event loop. Histories share their items, so that a response's descendants outlive it.
    """

    def __init__(self, max_records: int, max_bytes: int) -> None:
        self.max_records, self.max_bytes = max_records, max_bytes
        self.bytes = 0
        self._records: OrderedDict[str, tuple[Record, int]] = OrderedDict()
        self._items: dict[str, dict[str, Json]] = {}  # item id: the item, by the records that have it

    def __len__(self) -> int:
        return len(self._records)

    def check(self, items: tuple[Json, ...]) -> None:
        """400 if a record with this history can't be stored whatever the answer is."""
        self._check(_size(items))

    def put(self, record: Record) -> None:
        """Keep a response, forgetting older ones. Raises ApiError if it is too large alone."""
        size = _size(record.response) + _size(record.history)
        self._check(size)
        name = record.response["id"]
        self._records[name] = (record, size)
        self.bytes += size
        for item in (*record.items, *record.response["output"]):
            self._items.setdefault(item["id"], {})[name] = item
        while self.bytes > self.max_bytes or len(self._records) > self.max_records:
            self._drop(next(iter(self._records)))

    def get(self, name: str, param: str | None = None) -> Record:
        """The response of that id; 404 if there is none."""
        if name not in self._records:
            raise ApiError(
                404,
                f"Response with id {name!r:.100} not found: it was never stored, was deleted, or was"
                " forgotten for newer ones.",
                param=param,
                code="response_not_found",
            )
        self._records.move_to_end(name)
        return self._records[name][0]

    def delete(self, name: str) -> None:
        """Forget a response and its items; 404 if there is none."""
        self.get(name)
        self._drop(name)

    def item(self, name: str) -> Json:
        """The item of that id in a stored response's input or output; 404 if there is none."""
        if name not in self._items:
            raise ApiError(
                404, f"Item with id {name!r:.100} not found.", param="input", code="item_not_found"
            )
        return next(iter(self._items[name].values()))

    def _check(self, size: int) -> None:
        if size > self.max_bytes:
            raise invalid(
                f"The response with its history takes {size} bytes, the store holds {self.max_bytes}; set"
                " store to false, or start the server with a larger --response-store-max-mib.",
                "store",
                "response_store_capacity_exceeded",
            )

    def _drop(self, name: str) -> None:
        record, size = self._records.pop(name)
        self.bytes -= size
        for item in (*record.items, *record.response["output"]):
            owners = self._items[item["id"]]
            owners.pop(name, None)
            if not owners:
                del self._items[item["id"]]


def _size(value: object) -> int:
    return len(orjson.dumps(value))
