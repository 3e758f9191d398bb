"""Synthetic models: every format's bytes are legal and of the promised size, and whole models work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ninfer import Engine, EngineOptions, FinishReason, GenerationOptions
from ninfer.api import Done, Scorer, ScorerOptions
from ninfer.api.loading import load_frontend, opened
from ninfer.api.synthetic import Synthetic, is_synthetic
from ninfer.api.synthetic.geometries import ALIASES, GEOMETRIES
from ninfer.api.synthetic.profiles import PROFILES
from ninfer.artifact import Proposal, TensorObject
from ninfer.artifact.layouts import decode_rows
from ninfer.artifact.verify import check_tensor
from ninfer.errors import ArtifactError, ModelError, OptionError

CPU = torch.device("cpu")
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("geometry", ["tiny", "smollm2"])
def test_objects_are_legal_and_centred(geometry: str, profile: str):
    if (geometry, profile) in [("smollm2", "fp8"), ("smollm2", "bf16")]:
        pytest.skip("576 columns are no whole blocks" if profile == "fp8" else "bf16 is covered by tiny")
    model = Synthetic(f"synthetic:{geometry}/{profile}")
    seen = set()
    for weight in model._weights.values():
        tensor = weight.tensor
        key = (tensor.format, tensor.shape[-1:], "layers" in weight.members[0].parameter)
        if len(tensor.shape) != 2 or key in seen or weight.members[0].parameter.endswith("convolution"):
            continue
        seen.add(key)
        data = model.object_tensor(tensor.id, CPU)
        record = model.tensor(tensor.id)
        check_tensor(record, data.numpy())
        assert torch.equal(data, model.object_tensor(tensor.id, CPU))
        values = decode_rows(tensor.format, tensor.shape, data, 0, min(tensor.shape[0], 384))
        gain = 1 if "layers" in weight.members[0].parameter else 2
        assert values.isfinite().all()
        assert float(values.std()) * tensor.shape[1] ** 0.5 == pytest.approx(gain, rel=0.06)
        assert abs(float(values.mean())) < 4 * float(values.std()) / values.numel() ** 0.5
    assert seen


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("profile", PROFILES)
def test_objects_made_on_a_gpu(profile: str):
    model, device = Synthetic(f"synthetic:tiny/{profile}"), torch.device("cuda")
    for record in model.objects.values():
        assert isinstance(record, TensorObject)
        data = model.object_tensor(record.id, device)
        assert data.device.type == "cuda"
        assert torch.equal(data, model.object_tensor(record.id, device))
        check_tensor(record, data.cpu().numpy())
        if len(record.shape) == 2:
            values = decode_rows(record.format, record.shape, data.cpu(), 0, record.shape[0])
            assert values.isfinite().all()


def test_directory_is_one_that_a_file_could_have(tmp_path: Path):
    from ninfer.artifact import directory as directory_json
    from ninfer.artifact.records import FileEntry

    model = Synthetic("synthetic:tiny/quasar")
    root = directory_json.render(model.directory)
    root["files"] = [{"path": None, "payload_bytes": model.file_bytes}]
    parsed = directory_json.parse(root, "model.ninfer")
    assert parsed.objects == model.objects
    assert parsed.uses == model.uses
    assert parsed.files == (FileEntry(None, model.file_bytes),)


# Bytes read for a token of the 27B geometry: DESIGN.md, less 0.302 GB of states.
@pytest.mark.parametrize(
    ("profile", "size", "read"),
    [
        ("quasar", 16.28, 15.00),
        ("official", 20.38, 19.09),
        ("q4_k_m", 16.57, 15.85),
        ("groupwise", 17.09, 15.74),
    ],
)
def test_sizes_of_27b(profile: str, size: float, read: float):
    model = Synthetic(f"synthetic:qwen3_8_27b/{profile}")
    table = model.tensor(model.parameter("text/token_embedding")[0].object)
    assert model.file_bytes / 1e9 == pytest.approx(size, abs=0.01)
    assert (model.file_bytes - table.bytes) / 1e9 == pytest.approx(read, abs=0.02)


def test_policies_are_those_of_the_recipes():
    def policies(profile: str) -> dict[str, str | None]:
        return {use.parameter: use.activation_policy for use in Synthetic(f"synthetic:27b/{profile}").uses}

    quasar, official = policies("quasar"), policies("official")
    assert quasar["text/output_head"] == official["text/output_head"] == "AllowA8"
    assert quasar["text/layers/0/mlp/up"] == official["text/layers/55/mlp/up"] == "AllowA4"
    assert official["text/layers/56/mlp/up"] == official["text/layers/0/gdn/query"] == "AllowA8"
    assert set(policies("q4_k_m").values()) == {"A16Only"}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_geometry_can_be_planned(geometry: str):
    model = Synthetic(f"synthetic:{geometry}/q8_0")
    assert model.components["text"].config == GEOMETRIES[geometry].config
    assert model.file_bytes > 0


def test_aliases_mean_geometries():
    assert set(ALIASES.values()) <= set(GEOMETRIES)
    assert Synthetic("synthetic:27b/bf16").metadata == Synthetic("synthetic:qwen3_6_27b/bf16").metadata


@pytest.mark.parametrize(
    "name", ["synthetic:", "synthetic:tiny", "synthetic:huge/quasar", "synthetic:tiny/q3"]
)
def test_unknown_names_are_answered_with_the_known_ones(name: str):
    with pytest.raises(OptionError, match=r"geometries .*qwen3_8_27b.* profiles .*quasar.*q4_k_m"):
        Engine.load(name)


def test_only_the_prefix_makes_a_path_synthetic():
    assert is_synthetic(Path("synthetic:tiny/quasar"))
    assert not is_synthetic("./synthetic:tiny/quasar")
    assert not is_synthetic("models/synthetic")


def test_frontend_has_the_public_ids():
    with opened("synthetic:qwen3_8_27b/quasar", None, None) as model:
        frontend = load_frontend(model)
    assert frontend.public_tokens == 248_077
    assert frontend.stop_token_ids == (248_046, 248_044)
    for token, text in ((248_045, "<|im_start|>"), (248_058, "<tool_call>"), (248_069, "</think>")):
        assert frontend.decode([token], keep_special=True) == text
    assert re.fullmatch(r"( [a-z]+){40}", frontend.decode(range(1000, 248_000, 6200)))
    prompt = frontend.render(HELLO)
    assert frontend.decode(prompt.tokens, keep_special=True) == prompt.text


def test_resources_are_asked_for_by_role():
    model = Synthetic("synthetic:tiny/quasar")
    with pytest.raises(ArtifactError, match="no resource 'vocab'"):
        model.resource("text", "vocab")


@pytest.mark.parametrize("profile", ["quasar", "q4_k_m"])
def test_a_model_without_a_file_answers(profile: str):
    with Engine.load(f"synthetic:tiny/{profile}", EngineOptions(max_context=256)) as engine:
        assert engine.description.name == f"tiny-{profile}-synthetic"
        runs = []
        for seed in (0, 0, 1):
            events = list(
                engine.chat(HELLO, GenerationOptions(max_new=24, seed=seed, ignore_model_stops=True))
            )
            done = events[-1]
            assert isinstance(done, Done)
            assert done.statistics.finish_reason is FinishReason.OUTPUT_LIMIT
            runs.append(done.statistics.token_ids)
        assert runs[0] == runs[1] != runs[2]
        assert len(set(runs[0])) > 6
        first = runs[0][3]
        *_, done = engine.chat(HELLO, GenerationOptions(max_new=24, stop_token_ids=(first,)))
        assert isinstance(done, Done)
        assert done.statistics.finish_reason is FinishReason.STOP_TOKEN


def test_a_model_without_a_file_is_scored():
    with Scorer.load("synthetic:tiny/official", ScorerOptions(context=64)) as scorer:
        scores = scorer.score(scorer.encode("Nothing can be learned from this model."))
    # Logits have a standard deviation of about 2.
    assert -10 < scores.mean() < -5


def test_a_qwen_may_have_an_mtp_layer() -> None:
    with Engine.load("synthetic:tiny/quasar+mtp", EngineOptions(spec="mtp", draft_tokens=2, threads=1)) as e:
        *_, done = e.generate(
            [5, 6, 7], GenerationOptions(max_new=12, temperature=0, ignore_model_stops=True)
        )
        assert isinstance(done, Done)
        assert done.statistics.drafted_tokens > 0
    for name in ("tiny/quasar+vision", "tiny/quasar+", "tiny/quasar+proposal", "smollm2/bf16+mtp+proposal"):
        with pytest.raises(OptionError, match="there is no model"):
            Engine.load(f"synthetic:{name}")
    with pytest.raises(ModelError, match="has no MTP layer"):
        Engine.load("synthetic:tiny/quasar", EngineOptions(spec="mtp", draft_tokens=2))
    with pytest.raises(ModelError, match="has no proposal head"):
        Engine.load(
            "synthetic:tiny/quasar+mtp", EngineOptions(spec="mtp", draft_tokens=2, lm_head_draft=True)
        )


def test_a_qwen_may_have_a_proposal_head() -> None:
    big = Synthetic("synthetic:27b/quasar+mtp+proposal")
    assert big.components["text"].proposal == Proposal("indexed", 131_072)
    (head,), (ids,) = big.parameter("proposal/head"), big.parameter("proposal/token_ids")
    assert big.tensor(head.object).shape == (131_072, 5120)
    assert big.tensor(head.object).format == "q4_g64_fp16"
    tokens = big.object_tensor(ids.object, CPU).view(torch.int32)
    assert tokens.unique().numel() == len(tokens) == 131_072
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 248_077
    options = EngineOptions(spec="mtp", draft_tokens=2, lm_head_draft=True, threads=1)
    with Engine.load("synthetic:tiny/quasar+mtp+proposal", options) as engine:
        *_, done = engine.generate(
            [5, 6, 7], GenerationOptions(max_new=12, temperature=0, ignore_model_stops=True)
        )
        assert isinstance(done, Done)
        assert done.statistics.drafted_tokens > 0
