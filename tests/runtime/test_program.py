import numpy as np
import pytest
import torch

from ninfer.errors import CapacityError, ModelError, OptionError
from ninfer.ops import Purpose, SamplingParams
from ninfer.runtime import Program, executor

from .toy import PUBLIC, ToyModel, expected_answer, expected_token

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [(7 * i * i + 3) % PUBLIC for i in range(300)]


def answer(program: Program, prompt: list[int], count: int) -> list[int]:
    """A whole request, greedy; the last token stays unfed."""
    program.start(prompt, GREEDY)
    tokens = ()
    while not tokens:
        tokens = program.prefill().tokens
    program.commit(1)
    output = list(tokens)
    while len(output) < count:
        output += program.decode().tokens
        program.commit(1)
    return output


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 300])
def test_prefill_in_chunks_then_decode(recurrent: bool, length: int) -> None:
    model = ToyModel(recurrent)
    program = Program(model, max_context=512, prefill_chunk=128)
    prompt = PROMPT[:length]
    assert answer(program, prompt, 70) == expected_answer(prompt, 70, recurrent)
    chunks = -(-length // 128)
    assert model.widths[:chunks] == [128] * (chunks - 1) + [length - 128 * (chunks - 1)]
    assert program.frontier == length + 69


def test_prefill_reports_progress() -> None:
    program = Program(ToyModel(), max_context=512, prefill_chunk=128)
    admission = program.start(PROMPT, GREEDY)
    assert (admission.prompt_tokens, admission.reused_tokens) == (300, 0)
    steps = [program.prefill() for _ in range(3)]
    assert [step.processed_tokens for step in steps] == [128, 256, 300]
    assert [len(step.tokens) for step in steps] == [0, 0, 1]


@pytest.mark.parametrize("recurrent", [True, False])
def test_next_turn_continues_from_the_frontier(recurrent: bool) -> None:
    program = Program(ToyModel(recurrent), max_context=512, prefill_chunk=128)
    first = answer(program, PROMPT[:100], 10)
    second = PROMPT[:100] + first + PROMPT[:20]
    assert program.start(second, GREEDY).reused_tokens == 109
    assert answer(program, second, 5) == expected_answer(second, 5, recurrent)


@pytest.mark.parametrize("recurrent", [True, False])
def test_prompt_of_exactly_the_frontier_needs_no_forward_pass(recurrent: bool) -> None:
    model = ToyModel(recurrent)
    program = Program(model, max_context=512, prefill_chunk=128)
    prompt = PROMPT[:100] + answer(program, PROMPT[:100], 10)[:9]
    passes = len(model.widths)
    assert program.start(prompt, GREEDY).reused_tokens == len(prompt)
    assert program.prefill().tokens == (expected_token(prompt, recurrent),)
    assert len(model.widths) == passes


def test_attention_keeps_any_common_prefix() -> None:
    program = Program(ToyModel(recurrent=False), max_context=512, prefill_chunk=128)
    answer(program, PROMPT[:200], 10)
    edited = [*PROMPT[:150], 1, 2, 3]
    assert program.start(edited, GREEDY).reused_tokens == 150
    assert answer(program, edited, 5) == expected_answer(edited, 5, recurrent=False)
    shorter = PROMPT[:50]
    assert program.start(shorter, GREEDY).reused_tokens == 49
    assert answer(program, shorter, 5) == expected_answer(shorter, 5, recurrent=False)


def test_a_recurrent_state_is_never_cut_back() -> None:
    program = Program(ToyModel(), max_context=512, prefill_chunk=128)
    answer(program, PROMPT[:200], 10)
    edited = [*PROMPT[:150], 1, 2, 3]
    assert program.start(edited, GREEDY).reused_tokens == 0
    assert answer(program, edited, 5) == expected_answer(edited, 5)


def test_cancelled_prefill_is_resumed() -> None:
    program = Program(ToyModel(), max_context=512, prefill_chunk=128)
    program.start(PROMPT, GREEDY)
    program.prefill()
    assert program.start(PROMPT, GREEDY).reused_tokens == 128
    assert answer(program, PROMPT, 5) == expected_answer(PROMPT, 5)


def test_dropped_token_leaves_the_sequence_before_it() -> None:
    program = Program(ToyModel(), max_context=512, prefill_chunk=128)
    output = answer(program, PROMPT[:100], 3)
    program.decode()
    program.commit(0)
    with pytest.raises(ValueError):
        program.decode()
    assert answer(program, PROMPT[:100] + output, 4) == expected_answer(PROMPT[:100] + output, 4)


@pytest.mark.parametrize("recurrent", [True, False])
def test_interrupted_unit_changes_nothing(recurrent: bool) -> None:
    model = ToyModel(recurrent)
    program = Program(model, max_context=512, prefill_chunk=128)
    program.start(PROMPT, GREEDY)
    model.fail_at = 200
    program.prefill()
    with pytest.raises(KeyboardInterrupt):
        program.prefill()
    assert program.frontier == 128
    model.fail_at = None
    assert answer(program, PROMPT, 3) == expected_answer(PROMPT, 3, recurrent)
    model.fail_at = 302
    with pytest.raises(KeyboardInterrupt):
        program.decode()
    model.fail_at = None
    assert program.decode().tokens == (expected_answer(PROMPT, 4, recurrent)[3],)


@pytest.mark.parametrize("span", [1, 20, 200])
def test_forced_tokens_are_fed_before_the_next_draw(span: int) -> None:
    program = Program(ToyModel(), max_context=512, prefill_chunk=128)
    ledger = PROMPT[:100] + answer(program, PROMPT[:100], 3)
    forced = PROMPT[50 : 50 + span]
    program.force(forced)
    assert program.decode().tokens == (expected_token(ledger + forced),)
    assert program.frontier == 103 + span


def test_draws_are_keyed_by_position_and_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    real = executor.ops.sample

    def spy(logits, params, positions, purpose, counts):
        keys.append((positions[0], purpose))
        return real(logits, params, positions, purpose, counts)

    monkeypatch.setattr(executor.ops, "sample", spy)
    program = Program(ToyModel(), max_context=512, prefill_chunk=128)
    answer(program, PROMPT[:200], 3)
    program.force([1, 2, 3])
    program.decode()
    assert keys == [
        (200, Purpose.PREFILL),
        (200, Purpose.DECODE),
        (201, Purpose.DECODE),
        (205, Purpose.DECODE),
    ]


def test_penalties_count_committed_output_only() -> None:
    program = Program(ToyModel(), max_context=512, prefill_chunk=128)
    favourite = expected_token(PROMPT[:10])
    penalized = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=4.0)

    def first_token() -> int:
        program.start(PROMPT[:10], penalized)
        [token] = program.prefill().tokens
        return token

    assert first_token() == favourite
    program.commit(0)
    assert first_token() == favourite
    program.commit(1)
    program.force([favourite] * 2)
    counts = program._executor._counts[0]
    assert int(counts[favourite]) == 3
    assert int(counts.sum()) == 3
    assert first_token() == favourite  # a new request counts from zero


def test_output_limits() -> None:
    program = Program(ToyModel(), max_context=256, prefill_chunk=128)
    assert program.start(PROMPT[:200], GREEDY, 10).output_limit == 10
    full = program.start(PROMPT[:200], GREEDY, 58)
    assert (full.output_limit, full.limited_by_context) == (57, True)
    exact = program.start(PROMPT[:256], GREEDY)
    assert (exact.output_limit, exact.limited_by_context) == (1, True)
    even = program.start(PROMPT[:200], GREEDY, 57)
    assert (even.output_limit, even.limited_by_context) == (57, False)
    with pytest.raises(CapacityError, match=r"257 tokens but the context holds 256.*--max-context"):
        program.start(PROMPT[:257], GREEDY)


def test_context_can_be_filled_to_the_last_token() -> None:
    program = Program(ToyModel(), max_context=130, prefill_chunk=128)
    assert answer(program, PROMPT[:100], 31) == expected_answer(PROMPT[:100], 31)
    with pytest.raises(CapacityError, match="130 tokens is full"):
        program.decode()


@pytest.mark.parametrize(
    ("prompt", "max_output", "message"),
    [
        ([], None, "empty"),
        ([1, PUBLIC], None, f"token id {PUBLIC} at position 1"),
        ([-1], None, "token id -1"),
        ([1], 0, "at least 1"),
    ],
)
def test_bad_requests(prompt: list[int], max_output: int | None, message: str) -> None:
    program = Program(ToyModel(), max_context=256, prefill_chunk=128)
    first = answer(program, PROMPT[:10], 3)
    with pytest.raises(OptionError, match=message):
        program.start(prompt, GREEDY, max_output)
    program.commit(0)
    assert program.start(PROMPT[:10] + first, GREEDY).reused_tokens == 12


def test_bad_plans() -> None:
    with pytest.raises(CapacityError, match=r"4097.*4096 positions"):
        Program(ToyModel(), max_context=4097)
    with pytest.raises(OptionError, match="at least 1"):
        Program(ToyModel(), max_context=0)
    for chunk in (0, 100, -128):
        with pytest.raises(OptionError, match="multiple of 128"):
            Program(ToyModel(), max_context=256, prefill_chunk=chunk)
    assert Program(ToyModel(), max_context=100).plan.prefill_chunk == 100


def test_a_plan_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ninfer.runtime.program.available_bytes", lambda device: 1000)
    with pytest.raises(CapacityError, match="lower --max-context"):
        Program(ToyModel(), max_context=256)


def test_plan_counts_what_is_allocated() -> None:
    program = Program(ToyModel(), max_context=1000, prefill_chunk=256)
    run = program._executor
    tensors = [*(x for p in run._cache.kv for x in (p.k, p.v)), *run._cache.conv, *run._cache.recurrent]
    tensors += [*run._hidden, run._counts, run._page_table, run._staging]
    assert program.plan.total_bytes == sum(tensor.nbytes for tensor in tensors)
    assert "1,000 tokens" in str(program.plan)


@pytest.mark.parametrize("length", [2, 128, 129, 300])
def test_scores(length: int) -> None:
    program = Program(ToyModel(), max_context=512, prefill_chunk=128)
    answer(program, PROMPT[:20], 3)
    text = [*PROMPT[: length - 1], expected_token(PROMPT[: length - 1])]
    scores = program.score(text)
    rest = np.log(np.exp(5.0) + PUBLIC - 1)
    hits = [expected_token(text[:i]) == text[i] for i in range(1, length)]
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, [5.0 * hit - rest for hit in hits], rtol=1e-5)
    assert hits[-1]
    assert answer(program, PROMPT[:20], 3) == expected_answer(PROMPT[:20], 3)


def test_bad_scores() -> None:
    program = Program(ToyModel(), max_context=256, prefill_chunk=128)
    with pytest.raises(OptionError, match="at least 2"):
        program.score([1])
    with pytest.raises(OptionError, match="token id"):
        program.score([1, PUBLIC])
    with pytest.raises(CapacityError, match="257"):
        program.score(PROMPT[:257])


def test_scores_that_are_not_finite_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToyModel()
    monkeypatch.setattr(model, "logits", lambda hidden: torch.full((1, PUBLIC), float("inf")))
    program = Program(model, max_context=256)
    program.start([1], GREEDY)
    with pytest.raises(ModelError, match="aren't finite"):
        program.prefill()
