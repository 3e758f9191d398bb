"""Teacher-forced evaluation on held-out instances.

A greedy answer is exactly right if and only if every token of the right answer is the model's best one
given those before it, so one forward pass measures exactness. The engine's own runs are `python -m
bench.tasks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.tasks import generators
from bench.tasks.task import rng_for
from tools.nano.batches import read_texts
from tools.nano.documents import Document, Encoder
from tools.nano.model import Model, Parameters, Rows, losses, unbind
from tools.nano.packing import packing, room
from tools.nano.quantized import with_nvfp4

_TOKENS = 65_536
_INSTANCES = 100
_TEXTS = 60  # pieces of 2,048 tokens


@torch.no_grad()
def evaluate(model: Model, parameters: Parameters, corpus: Path, device: str = "cuda") -> dict[str, Any]:
    """By source: `exact` (share of instances), `loss` (nats a token), `agreement` (the MTP layer's best
    token against the trunk's, share of tokens), `loss_nvfp4`; all over learned tokens."""
    encoder = Encoder()
    plainly, rounded = (unbind(some, torch.bfloat16) for some in (parameters, with_nvfp4(parameters)))
    found: dict[str, Any] = {}
    for name, documents in _sources(encoder, corpus):
        plain = [0.0, 0.0, 0.0, 0.0]  # losses, agreements, tokens, exact instances
        quantized = 0.0
        for batch in _packed(documents):
            plain = [a + b for a, b in zip(plain, _score(model, plainly, batch, device), strict=True)]
            quantized += _score(model, rounded, batch, device)[0]
        found[name] = {
            "exact": plain[3] / len(documents),
            "loss": plain[0] / plain[2],
            "agreement": plain[1] / plain[2],
            "loss_nvfp4": quantized / plain[2],
        }
    return found


def _sources(encoder: Encoder, corpus: Path) -> Iterator[tuple[str, list[Document]]]:
    for name, texts in read_texts(corpus, "heldout").items():
        pieces = [encoder.text(text)[:2_048] for text in texts[:_TEXTS]]
        yield name, [Document(ids, np.ones(len(ids), dtype=bool)) for ids in pieces]
    for name, make in generators().items():
        tasks = (make(rng_for(name, "heldout", index), "heldout") for index in range(_INSTANCES))
        yield name, [encoder.task(task) for task in tasks]


def _packed(documents: list[Document]) -> Iterator[list[Document]]:
    """Groups of documents that fit into one pass."""
    group: list[Document] = []
    used = 0
    for document in documents:
        taken = room(len(document.ids))
        if group and used + taken > _TOKENS:
            yield group
            group, used = [], 0
        group.append(document)
        used += taken
    yield group


@torch.no_grad()
def _score(model: Model, rows: Rows, documents: list[Document], device: str) -> list[float]:
    """Sum of losses, agreeing tokens and learned tokens, and exactly right documents."""
    rooms = [room(len(document.ids)) for document in documents]
    ids = np.zeros(_TOKENS, dtype=np.int64)
    owner = np.full(_TOKENS, -1, dtype=np.int64)  # the document whose learned token follows
    begin = 0
    for index, (document, taken) in enumerate(zip(documents, rooms, strict=True)):
        length = len(document.ids)
        ids[begin : begin + length] = document.ids
        owner[begin : begin + length - 1][document.learned[1:]] = index
        begin += taken
    lengths = [*rooms, _TOKENS - begin] if begin < _TOKENS else rooms
    where = packing(np.array([0, *np.cumsum(lengths)]), device)
    tokens, owners = torch.from_numpy(ids).to(device), torch.from_numpy(owner).to(device)
    embedding, following = rows["embedding"][0], tokens.roll(-1)
    hidden = model.hidden(rows, tokens, where)
    loss, best = losses(hidden, embedding, following)
    learned = owners >= 0
    drafts = (model.draft(rows, hidden, following, where) @ embedding.mT).argmax(-1)
    agree = (drafts == best.roll(-1)) & learned.roll(-1)
    wrong = owners[learned & (best != following)].unique()
    return [
        float(loss[learned].sum()),
        float(agree.sum()),
        float(learned.sum()),
        len(documents) - len(wrong),
    ]
