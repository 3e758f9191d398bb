"""A real checkpoint: SmolLM2 as converted from its GGUF, against transformers on the dequantized weights."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from ninfer import models
from ninfer.api import Done, Engine, EngineOptions, GenerationOptions, Output, Statistics
from ninfer.artifact import Artifact
from ninfer.convert import ensure_artifact
from ninfer.engine import Core
from ninfer.formats import KvFormat
from ninfer.runtime import Limits, Program, Scoring, plan_model
from tests.engine.harness import Session, drain, request
from tests.engine.real import fresh_logits

from .smollm2 import GGUF, TEXT, reference, windows
from .test_transformers import teacher_forced

pytestmark = pytest.mark.skipif(not GGUF.exists(), reason=f"{GGUF.name} is not in models/; run `make demo`")
TOKENS, CONTEXT, STRIDE = 5000, 1024, 512


@pytest.fixture(scope="module")
def artifact_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_artifact(GGUF, cache_dir=tmp_path_factory.mktemp("cache"))


def text_tokens(artifact: Artifact) -> list[int]:
    tokenizer = Tokenizer.from_str(artifact.resource("text", "tokenizer.json").decode())
    return tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids[:TOKENS]


def test_perplexity_is_that_of_transformers(artifact_path: Path) -> None:
    """Window 1,024, stride 512, 5,000 tokens: within 0.3 % in BF16 activations on the quantized weights."""
    hf = reference()
    ours = theirs = 0.0
    with Artifact.open(artifact_path) as artifact:
        tokens = text_tokens(artifact)
        assert len(tokens) == TOKENS
        scoring = Scoring(models.load(artifact), CONTEXT)
        for begin, first, end in windows(TOKENS, CONTEXT, STRIDE):
            window = tokens[begin:end]
            ours -= scoring.score(window, first - begin).sum(dtype="float64")
            with torch.no_grad():
                logits = hf(torch.tensor([window]), use_cache=False).logits[0, first - begin - 1 : -1]
            wanted = torch.tensor(tokens[first:end])
            theirs += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
    scored = TOKENS - 1
    assert math.exp(ours / scored) == pytest.approx(math.exp(theirs / scored), rel=0.003)


def test_the_artifact_has_the_references_weights(artifact_path: Path) -> None:
    """Float32 activations: what remains is the order of summation."""
    hf = reference()
    with Artifact.open(artifact_path) as artifact:
        tokens = text_tokens(artifact)[:64]
        scoring = Scoring(models.load(artifact, activation_dtype=torch.float32), 64)
        ours = torch.from_numpy(scoring.score(tokens))
    with torch.no_grad():
        logits = hf(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    theirs = -torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
    assert (ours - theirs).abs().max() < 0.01


def perplexity(model: models.Model, tokens: list[int], kv_format: KvFormat) -> float:
    """In windows of 1,200 tokens that share nothing."""
    scoring = Scoring(model, 1200, kv_format=kv_format)
    scores = [scoring.score(tokens[begin : begin + 1200]) for begin in range(0, len(tokens), 1200)]
    return math.exp(-np.concatenate(scores).mean(dtype=float))


def test_quantized_kv_costs_little(artifact_path: Path) -> None:
    """INT8 and FP8 as promised; four bits cost this small model more, the bound catches a broken codec."""
    with Artifact.open(artifact_path) as artifact:
        tokens = text_tokens(artifact)[:4800]
        model = models.load(artifact)
    plain = perplexity(model, tokens, KvFormat.BF16)
    assert abs(perplexity(model, tokens, KvFormat.INT8) / plain - 1) < 0.002
    assert abs(perplexity(model, tokens, KvFormat.FP8) / plain - 1) < 0.005
    plain = perplexity(model, tokens[:1200], KvFormat.BF16)
    for kv_format in (KvFormat.NVFP4, KvFormat.K8V4):
        assert abs(perplexity(model, tokens[:1200], kv_format) / plain - 1) < 0.15


def test_a_conversation_computes_only_what_is_new(artifact_path: Path) -> None:
    """Continued, after a cancelled turn, and with its last message edited."""
    options = EngineOptions(max_context=1024, prefill_chunk=128)
    greedy = GenerationOptions(max_new=12, temperature=0)
    with Engine.load(artifact_path, options) as engine:
        text = TEXT.read_text(encoding="utf-8")[:2000]
        turn = [{"role": "user", "content": f"{text}\n\nWhat is this about?"}]

        def ask(*messages: str) -> Statistics:
            asked = [*turn, *({"role": "user", "content": message} for message in messages)]
            done = list(engine.chat(asked, greedy))[-1]
            assert isinstance(done, Done)
            return done.statistics

        first = ask()
        assert first.reused_tokens == 0
        turn.append({"role": "assistant", "content": engine.chat(turn, greedy).text()})
        second = ask("Who reads it?")
        assert second.reused_tokens >= first.prompt_tokens
        story = engine.chat([*turn, {"role": "user", "content": "Tell me a long story."}], greedy)
        for event in story:
            if isinstance(event, Output):
                story.cancel()
        for other in (ask("Who reads it?"), ask("Who wrote it, and when?")):
            assert other.prompt_tokens - other.reused_tokens < 0.1 * first.prompt_tokens


def test_cached_and_cold_answers_part_at_near_ties_only(artifact_path: Path, record_property) -> None:
    """A turn that resumes from what is cached is cut into other chunks than a cold one; where the greedy
    answers then differ first, the token taken is at most half a logit behind the best."""
    with Artifact.open(artifact_path) as artifact:
        model = models.load(artifact)
        tokens = text_tokens(artifact)
    plan = plan_model(model, Limits(max_context=1024, prefill_chunk=256))
    core = Core(Program(model, plan).run, plan, public_tokens=model.public_tokens)
    compared = parted = reused = 0
    for begin in range(0, 1600, 400):
        history = tokens[begin : begin + 300]
        for _ in range(3):
            ids, statistics, _ = drain(core.submit(request(history, 16), Session()))
            cold, _, _ = drain(core.submit(request(history, 16, reuse=False), Session()))
            if ids != cold:
                first = next(i for i, pair in enumerate(zip(ids, cold, strict=True)) if pair[0] != pair[1])
                scores = fresh_logits(model, [*history, *cold[:first]])
                assert scores.max() - scores[ids[first]] <= 0.5
                parted += 1
            compared, reused = compared + 1, reused + statistics.reused_tokens
            history += ids + tokens[begin + 300 : begin + 330]
    core.stop()
    record_property("answers compared", compared)
    record_property("answers that part at a near-tie", parted)
    print(f"{parted} of {compared} answers part at a near-tie")
    assert reused > 2000


def test_decode_follows_prefill(artifact_path: Path) -> None:
    """Greedy decode picks the argmax of one prefill over its own answer, near-ties aside."""
    with Artifact.open(artifact_path) as artifact:
        model = models.load(artifact)
        tokens = text_tokens(artifact)[:100]
    plan = plan_model(model, Limits(max_context=256))
    core = Core(Program(model, plan).run, plan, public_tokens=model.public_tokens)
    output, _, _ = drain(core.submit(request(tokens, 24), Session()))
    core.stop()
    fed = tuple(tokens + output[:-1])
    logits = teacher_forced(model, fed, [len(fed)])[len(tokens) - 1 :]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert (logits.max(1).values - chosen).max() <= 0.05 * logits.std()  # two BF16 steps of a large logit
