"""Whatever state an answer resumes from, it is the one that a cold run gives.

Exact where the rest of the prompt is cut as in the cold run; else answers may part at a near-tie.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from ninfer.engine import Marks
from ninfer.events import FinishReason
from ninfer.formats import KvFormat
from ninfer.ops import SamplingParams
from ninfer.runtime.records import Unit
from tests.models.conftest import one_thread  # noqa: F401
from tests.models.loaded import loaded
from tests.runtime.hand import Hand, Lane

from .harness import GREEDY, drain
from .real import Desk, Reply, differences

pytestmark = pytest.mark.parametrize("kv_format", list(KvFormat))
MODEL, CHUNK, OUTPUTS = "qwen3.5", 128, 32
SAMPLED = SamplingParams(0.7, top_k=20, top_p=0.8, presence_penalty=0.5, frequency_penalty=0.3, seed=20260826)

WITHOUT_PENALTIES = SamplingParams(0.9, seed=77)


@dataclass(frozen=True)
class Chat:
    """Messages of random tokens, each with a header, and a header that opens the answer."""

    messages: tuple[tuple[int, ...], ...]

    @property
    def starts(self) -> list[int]:
        lengths = [len(message) for message in self.messages]
        return [sum(lengths[:index]) for index in range(len(lengths))]

    @property
    def opener(self) -> int:
        return sum(map(len, self.messages))

    @property
    def prompt(self) -> list[int]:
        return [token for message in self.messages for token in message] + [3, 4, 5]

    @property
    def marks(self) -> Marks:
        return Marks(tuple(self.starts), len(self.messages[0]), self.opener)

    def followed_by(self, ids: Sequence[int], message: Sequence[int]) -> "Chat":
        """The next turn: the answer as it was given, and a user's message."""
        return Chat((*self.messages, (3, 4, 5, *ids), tuple(message)))

    def rewritten(self, message: Sequence[int]) -> "Chat":
        """The same with another last message."""
        return Chat((*self.messages[:-1], tuple(message)))


def some(seed: int, count: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(190) for _ in range(count))


CHAT = Chat((some(1, 75), some(2, 190), some(3, 60), some(4, 101)))


def ask(desk: Desk, chat: Chat, count: int = OUTPUTS, **options) -> Reply:
    """An answer; whatever is reused, the rest is computed and nothing more."""
    reply = desk.ask(chat.prompt, count, marks=chat.marks, **options)
    assert reply.computed == len(chat.prompt) - reply.reused
    return reply


def desk_of(kv_format: KvFormat, **options) -> Desk:
    return Desk(loaded(MODEL), kv_format=kv_format, chunk=CHUNK, snapshots=8, **options)


def cold(kv_format: KvFormat, chat: Chat, count: int = OUTPUTS, **options) -> list[int]:
    with desk_of(kv_format) as desk:
        reply = ask(desk, chat, count, **options)
        assert reply.reused == 0
        return reply.ids


def continued(kv_format: KvFormat, chat: Chat, ids: Sequence[int], after: Chat) -> list[int]:
    """The next turn's answer when the sequence was never left: all of it in one place, cut as the engine cuts
    it, by hand."""
    hand = Hand(loaded(MODEL), context=1024, chunk=CHUNK, snapshots=0, kv_format=kv_format)
    lane = Lane(range(16))
    prompt = chat.prompt
    for end in cuts(0, len(prompt), (len(chat.messages[0]), chat.starts[-1], chat.opener)):
        hand.prefill(lane, prompt[lane.frontier : end])
        lane.advance(end - lane.frontier)
    for token in ids[:-1]:
        hand.round([lane], [[token]])
        lane.advance(1)
    prompt = after.prompt
    token = -1
    for end in cuts(lane.frontier, len(prompt), (after.starts[-1], after.opener)):
        token = hand.prefill(lane, prompt[lane.frontier : end], draw=True)
        lane.advance(end - lane.frontier)
    return [token, *hand.decode(lane, token, OUTPUTS - 1)]


def cuts(base: int, end: int, taps: Sequence[int]) -> Iterator[int]:
    """Ends of chunks, counted from the base and anew from every tap."""
    while base < end:
        base = min([base + CHUNK, end, *(tap for tap in taps if tap > base)])
        yield base


def test_a_repeated_prompt(kv_format: KvFormat) -> None:
    """Greedy and sampled: the same ids from the snapshot before the answer, every time."""
    expected, sampled = cold(kv_format, CHAT), cold(kv_format, CHAT, sampling=SAMPLED)
    assert expected != sampled
    with desk_of(kv_format) as desk:
        assert ask(desk, CHAT).ids == expected
        for _ in range(3):
            assert ask(desk, CHAT) == Reply(expected, CHAT.opener, 3)
            assert ask(desk, CHAT, sampling=SAMPLED) == Reply(sampled, CHAT.opener, 3)


def test_restored_scores_are_the_same_bits(kv_format: KvFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """First token and all others; noting scores keeps rounds from being recorded, which changes nothing."""
    model, scores = loaded(MODEL), []
    real = type(model).logits

    def noted(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = real(self, hidden)
        scores.append(logits.clone())
        return logits

    recorded = cold(kv_format, CHAT)
    monkeypatch.setattr(type(model), "logits", noted)
    with desk_of(kv_format) as desk:
        for turn in range(3):
            assert ask(desk, CHAT).ids == recorded
            assert len(scores) == OUTPUTS * (turn + 1)
        assert all(not step.recorded for step in desk.program._rounds.values())
    first = torch.cat(scores[:OUTPUTS])
    for turn in (1, 2):
        assert torch.equal(torch.cat(scores[OUTPUTS * turn : OUTPUTS * (turn + 1)]), first)


def test_appended_turns(kv_format: KvFormat, record_property) -> None:
    """A second and a third turn continue where the answer before them ended."""
    with desk_of(kv_format) as desk:
        chat, parted = CHAT, 0
        reply = ask(desk, chat)
        for turn in range(2):
            after = chat.followed_by(reply.ids, some(10 + turn, 150 - 70 * turn))
            previous, reply = reply, ask(desk, after)
            assert reply.reused == len(chat.prompt) + OUTPUTS - 1
            if turn == 0:
                assert reply.ids == continued(kv_format, chat, previous.ids, after)
            expected = cold(kv_format, after)
            parted += differences(desk.model, after.prompt, reply.ids, expected, kv_format)
            chat = after
        assert ask(desk, chat) == Reply(reply.ids, chat.opener, 3)
    record_property("answers that part at a near-tie", parted)


class Knowing:
    """Drafts that are right, as long as the text goes on as it is known to."""

    def __init__(self, *texts: Sequence[int]) -> None:
        self.texts = [list(text) for text in texts]

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        for text in self.texts:
            if text[: len(tokens)] == list(tokens):
                return text[len(tokens) : len(tokens) + limit]
        return []


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_stop_inside_a_round(kv_format: KvFormat, place: int) -> None:
    """Drafts agree beyond the stop; what follows is the same as after a run that ended there by itself."""
    expected = cold(kv_format, CHAT)
    stop = next(
        expected[i] for i in range(9 + place, OUTPUTS, 4) if expected[i] not in expected[:i]
    )  # the first round starts at output 1, so this is column `place`
    count = expected.index(stop) + 1
    after = CHAT.followed_by(expected[:count], some(20, 140))
    drafts = Knowing([*CHAT.prompt, *expected])
    with desk_of(kv_format) as plain, desk_of(kv_format, width=4, drafts=drafts) as desk:
        assert ask(desk, CHAT, stop=stop).ids == ask(plain, CHAT, stop=stop).ids == expected[:count]
        rounds = desk.units.count(Unit.ROUND)
        assert rounds < plain.units.count(Unit.ROUND) / 2
        assert desk.core.statistics().accepted_tokens >= count - 1 - rounds
        reply = ask(desk, after)
        assert reply == ask(plain, after)
        assert reply.reused == len(CHAT.prompt) + count - 1
        assert reply.ids == continued(kv_format, CHAT, expected[:count], after)


def test_drafts_change_nothing(kv_format: KvFormat) -> None:
    """Right, wrong and no drafts, greedy and sampled, to the limits of output."""
    for sampling in (GREEDY, WITHOUT_PENALTIES):
        expected = cold(kv_format, CHAT, sampling=sampling)
        half = [*CHAT.prompt, *expected[:10], 7, 7, 7]
        mistaken = [*CHAT.prompt, *expected[:17], (expected[17] + 1) % 190, *expected[18:]]
        for texts in ([[*CHAT.prompt, *expected]], [half], [mistaken], []):
            with desk_of(kv_format, width=4, drafts=Knowing(*texts)) as desk:
                for count in (1, 2, OUTPUTS):
                    assert ask(desk, CHAT, count, sampling=sampling).ids == expected[:count], texts


def test_a_rewritten_last_message(kv_format: KvFormat) -> None:
    """It branches off before the message, and gives exactly what a cold run gives."""
    with desk_of(kv_format) as desk:
        ask(desk, CHAT)
        for version in range(3):
            edited = CHAT.rewritten(some(30 + version, 80 + 30 * version))
            reply = ask(desk, edited)
            assert reply.reused == CHAT.starts[-1]
            assert reply.ids == cold(kv_format, edited)
        # A system block alone in common: its end is where the other conversation begins.
        other = Chat((CHAT.messages[0], some(40, 150)))
        reply = ask(desk, other)
        assert reply.reused == CHAT.starts[1]
        assert reply.ids == cold(kv_format, other)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_cancelled_during_prefill(kv_format: KvFormat, chunks: int) -> None:
    with desk_of(kv_format) as desk:
        handles = []

        def after_unit(unit: Unit) -> None:
            if desk.units.count(Unit.PREFILL) == chunks:
                handles[0].cancel()

        desk.on_unit = after_unit
        with desk.core._condition:  # the worker waits until the handle is known
            handles.append(desk.submit(CHAT.prompt, OUTPUTS, marks=CHAT.marks))
        ids, statistics, _ = drain(handles[0])
        assert (ids, statistics.finish_reason) == ([], FinishReason.CANCELLED)
        assert desk.units == [Unit.PREFILL] * chunks
        desk.on_unit = None
        reached = desk.prefilled
        assert reached == [75, 203, 325][chunks - 1]
        reply = ask(desk, CHAT)
        assert reply == Reply(cold(kv_format, CHAT), reached, len(CHAT.prompt) - reached)


@pytest.mark.parametrize("rounds", [1, 9])
def test_cancelled_during_decode(kv_format: KvFormat, rounds: int) -> None:
    with desk_of(kv_format) as desk:
        handles = []

        def after_unit(unit: Unit) -> None:
            if desk.units.count(Unit.ROUND) == rounds:
                handles[0].cancel()

        desk.on_unit = after_unit
        with desk.core._condition:
            handles.append(desk.submit(CHAT.prompt, OUTPUTS, marks=CHAT.marks))
        ids, statistics, _ = drain(handles[0])
        desk.on_unit = None
        assert statistics.finish_reason is FinishReason.CANCELLED
        expected = cold(kv_format, CHAT)
        assert ids == expected[: rounds + 1]
        after = CHAT.followed_by(ids, some(50, 130))
        reply = ask(desk, after)
        assert reply.reused == len(CHAT.prompt) + rounds
        assert reply.ids == continued(kv_format, CHAT, ids, after)
        differences(desk.model, after.prompt, reply.ids, cold(kv_format, after), kv_format)
        # The question asked again, and then with another last message.
        assert ask(desk, CHAT) == Reply(expected, CHAT.opener, 3)
        edited = CHAT.rewritten(some(51, 90))
        reply = ask(desk, edited)
        assert reply.reused == CHAT.starts[-1]
        assert reply.ids == cold(kv_format, edited)
