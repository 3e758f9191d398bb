"""Tasks as training documents, and their packing by share."""

from __future__ import annotations

import numpy as np
import pytest

from bench.tasks import generators
from bench.tasks.task import rng_for
from tools.nano.batches import IGNORED, Sampler
from tools.nano.documents import Encoder
from tools.nano.mix import SOURCES, TASKS, TEXT
from tools.nano.packing import CHUNK

TEXTS = {"prose": ["A river ran by the house. " * 900], "code-files": ["x = 1\n" * 700]}


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder()


@pytest.mark.parametrize("name", sorted(generators()))
def test_a_document_is_what_the_template_makes_of_the_whole_conversation(encoder: Encoder, name: str) -> None:
    for index in range(4):
        task = generators()[name](rng_for(name, "heldout", index), "heldout")
        document = encoder.task(task)
        whole = encoder.frontend.render(
            [*task.messages, {"role": "assistant", **task.answer}],
            tools=task.tools or None,
            thinking=task.thinking,
            add_generation_prompt=False,
        )
        ended = encoder.frontend.encode("\n")  # after the final <|im_end|>, which the model does not write
        assert [*document.ids.tolist(), *ended] == whole.tokens
        prompt = encoder.frontend.render(task.messages, tools=task.tools or None, thinking=task.thinking)
        assert document.learned[len(prompt.tokens) :].all()
        assert not document.learned[: prompt.tokens.index(encoder.frontend.encode("user")[0])].any()


def test_batches_keep_the_shares_and_are_repeatable(encoder: Encoder) -> None:
    first, again = (Sampler(TEXTS, encoder, "seed", "train") for _ in range(2))
    tokens = np.zeros(len(SOURCES))
    for _ in range(6):
        batch, same = first.batch(32_768), again.batch(32_768)
        assert np.array_equal(batch.tokens, same.tokens)
        assert np.array_equal(batch.sources, same.sources)
        assert batch.ends[0] == 0
        assert batch.ends[-1] == 32_768
        assert not (batch.ends % CHUNK).any()
        learned = batch.sources[batch.sources != IGNORED]
        tokens += np.bincount(learned, minlength=len(SOURCES))
        assert (batch.sources[batch.ends[1:] - 1] == IGNORED).all()  # nothing follows a document
    shares = TEXT | TASKS
    texts = [tokens[SOURCES.index(name)] / sum(tokens) for name in TEXT]
    assert texts[0] / texts[1] == pytest.approx(shares["prose"] / shares["code-files"], rel=0.2)
    assert (tokens > 0).all()
