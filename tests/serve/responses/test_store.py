"""The store against a model of it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ninfer.serve.errors import ApiError
from ninfer.serve.responses.listing import listed
from ninfer.serve.responses.store import Record, Store

RECORDS, BYTES = 4, 2000


def item(name: str, size: int = 0) -> dict[str, Any]:
    return {"id": name, "type": "message", "text": "x" * size}


def record(name: str, items: list[Any], output: list[Any], before: tuple[Any, ...] = ()) -> Record:
    response = {"id": name, "output": output}
    return Record(response, tuple(items), (*before, *items, *output))


def size(made: Record) -> int:
    return len(orjson.dumps(made.response)) + len(orjson.dumps(made.history))


class Chains(RuleBasedStateMachine):
    """Any sequence of creating, chaining, fetching, deleting and naming items."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(RECORDS, BYTES)
        self.kept: dict[str, Record] = {}  # oldest use first
        self.known: list[str] = []
        self.count = 0

    @rule(parent=st.integers(0, 9), length=st.integers(0, 700), answer=st.integers(0, 300))
    def create(self, parent: int, length: int, answer: int) -> None:
        before: tuple[Any, ...] = ()
        if self.known and parent < len(self.known):
            name = self.known[-1 - parent]
            if name not in self.kept:
                self.missing(name)
                return
            before = self.store.get(name).history
            assert before == self.kept[name].history
            self.kept[name] = self.kept.pop(name)
        self.count += 1
        name = f"resp_{self.count}"
        made = record(name, [item(f"in_{self.count}", length)], [item(f"out_{self.count}", answer)], before)
        if size(made) > BYTES:
            with pytest.raises(ApiError) as caught:
                self.store.put(made)
            assert caught.value.code == "response_store_capacity_exceeded"
            return
        self.store.put(made)
        self.known.append(name)
        self.kept[name] = made
        while len(self.kept) > RECORDS or sum(map(size, self.kept.values())) > BYTES:
            del self.kept[next(iter(self.kept))]

    @rule(back=st.integers(0, 9), delete=st.booleans())
    def use(self, back: int, delete: bool) -> None:
        if back >= len(self.known):
            return
        name = self.known[-1 - back]
        if name not in self.kept:
            self.missing(name)
        elif delete:
            self.store.delete(name)
            del self.kept[name]
        else:
            assert self.store.get(name) is self.kept[name]
            self.kept[name] = self.kept.pop(name)

    def missing(self, name: str) -> None:
        for use in (self.store.get, self.store.delete):
            with pytest.raises(ApiError) as caught:
                use(name)
            assert (caught.value.status, caught.value.code) == (404, "response_not_found")

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert len(self.store) == len(self.kept)
        assert self.store.bytes == sum(map(size, self.kept.values())) <= BYTES
        for number in range(1, self.count + 1):
            for name in (f"in_{number}", f"out_{number}"):
                if f"resp_{number}" in self.kept:
                    assert self.store.item(name)["id"] == name
                else:
                    with pytest.raises(ApiError):
                        self.store.item(name)


Chains.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestChains = Chains.TestCase


def test_an_item_lives_as_long_as_one_of_its_records() -> None:
    store = Store(9, BYTES)
    shared = item("shared")
    store.put(record("a", [], [shared]))
    store.put(record("b", [shared], []))
    store.delete("a")
    assert store.item("shared") is shared
    store.delete("b")
    with pytest.raises(ApiError):
        store.item("shared")


def test_a_history_that_is_too_large_is_refused_before_the_answer_is_made() -> None:
    store = Store(9, 100)
    store.check((item("a"),))
    with pytest.raises(ApiError) as caught:
        store.check((item("a", 100),))
    assert (caught.value.status, caught.value.param) == (400, "store")


ITEMS = [item(name) for name in "abcde"]


def page(*query: tuple[str, str]) -> tuple[str, bool]:
    made = listed(ITEMS, query)
    ids = "".join(entry["id"] for entry in made["data"])
    assert made["object"] == "list"
    assert (made["first_id"], made["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
    return ids, made["has_more"]


def test_pages() -> None:
    assert page() == ("edcba", False)
    assert page(("order", "asc"), ("limit", "2")) == ("ab", True)
    assert page(("order", "asc"), ("limit", "2"), ("after", "b")) == ("cd", True)
    assert page(("order", "asc"), ("limit", "2"), ("after", "d")) == ("e", False)
    assert page(("limit", "2"), ("after", "c")) == ("ba", False)
    assert page(("after", "a")) == ("", False)


@pytest.mark.parametrize(
    ("query", "code"),
    [
        (("limit", "0"), "invalid_pagination"),
        (("limit", "101"), "invalid_pagination"),
        (("limit", "1" * 5000), "invalid_pagination"),
        (("limit", "²"), "invalid_pagination"),
        (("order", "up"), "invalid_pagination"),
        (("after", "z"), "invalid_pagination"),
        (("include", "x"), "include_not_supported"),
        (("before", "a"), "unknown_parameter"),
    ],
)
def test_wrong_pages(query: tuple[str, str], code: str) -> None:
    with pytest.raises(ApiError) as caught:
        listed(ITEMS, [query])
    assert caught.value.code == code


def test_images_are_left_out_of_pages_unless_asked_for() -> None:
    image = {"type": "input_image", "image_url": "data:x", "detail": "high"}
    items = [
        {"id": "a", "type": "function_call_output", "output": [image, {"type": "input_text", "text": "t"}]}
    ]
    (shown,) = listed(items, [])["data"]
    assert shown["output"] == [{**image, "image_url": None}, {"type": "input_text", "text": "t"}]
    assert items[0]["output"][0]["image_url"] == "data:x"
    (whole,) = listed(items, [("include[]", "message.input_image.image_url")])["data"]
    assert whole == items[0]
