"""What the named recipes store, how far it is from the source, and what recipe files can say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ninfer.artifact import Artifact
from ninfer.convert import convert
from ninfer.errors import ConversionError

from . import tiny
from .logical import everything, expected_qwen, read

# rms of the error over rms of normally distributed weights
LIMITS = {
    "bf16": 0.0,
    "fp32": 0.0,
    "q4_g64_fp16": 0.13,
    "q5_g64_fp16": 0.065,
    "q6_g64_fp16": 0.033,
    "q8_g32_fp16": 0.009,
    "nvfp4": 0.12,
    "fp8_e4m3fn_row_bf16": 0.03,
}
Source = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("tiled")
    return folder, tiny.write_qwen(folder, tiny.TILED, has_mtp=True)


def _formats(artifact: Artifact) -> dict[str, str]:
    return {name: artifact.tensor(artifact.parameter(name)[0].object).format for name in artifact.bindings}


def _policies(artifact: Artifact) -> dict[str, str | None]:
    return {use.parameter: use.activation_policy for use in artifact.uses}


def _check_values(artifact: Artifact, tensors: dict[str, torch.Tensor], size: tiny.Size) -> None:
    formats = _formats(artifact)
    for name, values in expected_qwen(tensors, size, "mtp" in artifact.components).items():
        error = read(artifact, name) - values.reshape(-1)
        relative = float(error.square().mean().sqrt() / values.square().mean().sqrt())
        assert relative <= LIMITS[formats[name]], (name, formats[name], relative)


BASIC = ["bf16", "groupwise-int", "groupwise-int8", "nvfp4-official", "quasar", "preserved", "qwen3_6_27b"]


@pytest.mark.parametrize("recipe", BASIC)
def test_values_are_within_the_formats_error(source: Source, tmp_path: Path, recipe: str) -> None:
    folder, tensors = source
    report = convert(folder, tmp_path / "out.ninfer", recipe=recipe, components=("text", "mtp"))
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        _check_values(artifact, tensors, tiny.TILED)
    assert report.fallbacks == ()


def test_groupwise_formats_and_packing(source: Source, tmp_path: Path) -> None:
    convert(source[0], tmp_path / "out.ninfer", recipe="groupwise-int", components=("text", "mtp"))
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        formats = _formats(artifact)
        expected = {
            "text/token_embedding": "q8_g32_fp16",
            "text/output_head": "q8_g32_fp16",
            "text/layers/1/attention/query": "q4_g64_fp16",
            "text/layers/1/attention/gate": "q5_g64_fp16",
            "text/layers/1/attention/output": "q5_g64_fp16",
            "text/layers/0/gdn/key": "q4_g64_fp16",
            "text/layers/0/gdn/z": "q5_g64_fp16",
            "text/layers/0/gdn/a_projection": "bf16",
            "text/layers/0/gdn/a_log": "fp32",
            "text/layers/0/mlp/up": "q4_g64_fp16",
            "text/layers/0/mlp/down": "q5_g64_fp16",
            "mtp/input_projection": "q8_g32_fp16",
            "mtp/layers/0/mlp/down": "q8_g32_fp16",
        }
        assert {name: formats[name] for name in expected} == expected
        assert set(_policies(artifact).values()) == {"A16Only"}
        groups = [
            ("text/layers/1/attention/query", "text/layers/1/attention/key"),
            ("text/layers/1/attention/gate", "text/layers/1/attention/value"),
            ("text/layers/0/gdn/query", "text/layers/0/gdn/key"),
            ("text/layers/0/gdn/value", "text/layers/0/gdn/z"),
            ("text/layers/0/mlp/gate", "text/layers/0/mlp/up"),
        ]
        groups.append(tuple(f"mtp/layers/0/attention/{name}" for name in ("query", "key", "gate", "value")))  # type: ignore[arg-type]
        for members in groups:
            (first,) = {artifact.parameter(name)[0].object for name in members}
            owners = {n for n in artifact.bindings if artifact.parameter(n)[0].object == first}
            assert owners == set(members)
        a, b = (artifact.parameter(f"text/layers/0/gdn/{n}_projection")[0].object for n in "ab")
        assert a != b


def test_official_mix_encoded(tmp_path: Path) -> None:
    size = tiny.Size(**{**tiny.TILED.__dict__, "layer_types": ("linear", "full") * 4})
    tiny.write_qwen(tmp_path / "hf", size)
    convert(tmp_path / "hf", tmp_path / "out.ninfer", recipe="nvfp4-official")
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        formats, policies = _formats(artifact), _policies(artifact)
        assert formats["text/layers/6/mlp/down"] == "nvfp4"
        assert formats["text/layers/7/mlp/down"] == "fp8_e4m3fn_row_bf16"
        assert formats["text/layers/1/attention/gate"] == formats["text/output_head"] == "fp8_e4m3fn_row_bf16"
        assert policies["text/layers/1/attention/gate"] == policies["text/output_head"] == "AllowA8"
        assert policies["text/layers/6/mlp/down"] == "A16Only"
        a, b = (artifact.parameter(f"text/layers/0/gdn/{n}_projection")[0].object for n in "ab")
        assert a == b


def test_shapes_that_nvfp4_cannot_hold_fall_back(tmp_path: Path) -> None:
    tensors = tiny.write_qwen(tmp_path / "hf")
    report = convert(tmp_path / "hf", tmp_path / "out.ninfer", recipe="quasar")
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        _check_values(artifact, tensors, tiny.SMALL)
        formats = _formats(artifact)
    fallen = {fallback.parameter: fallback for fallback in report.fallbacks}
    assert formats["text/layers/0/mlp/gate"] == "q8_g32_fp16"
    assert "N % 128" in fallen["text/layers/0/mlp/gate"].reason
    assert formats["text/layers/2/attention/query"] == "nvfp4"  # 128 rows of 64
    assert "text/layers/2/attention/query" not in fallen
    assert report.document["fallbacks"][0]["wanted"] == "nvfp4"


def test_a_recipe_file_that_names_an_impossible_format_is_refused(tmp_path: Path) -> None:
    tiny.write_qwen(tmp_path / "hf")
    recipe = _recipe(tmp_path, "recipe.assign('*/mlp/gate', format='nvfp4', method='nvfp4_mse')")
    with pytest.raises(ConversionError, match=r"'text/layers/0/mlp/gate' cannot be stored .* N % 128"):
        convert(tmp_path / "hf", tmp_path / "out.ninfer", recipe=recipe)


def _recipe(folder: Path, *lines: str, function: str = "configure") -> str:
    path = folder / "recipe.py"
    path.write_text(f"def {function}(recipe):\n" + "\n".join(f"    {line}" for line in lines))
    return str(path) if function == "configure" else f"{path}:{function}"


def test_recipe_files_assign_split_group_separate_and_share(source: Source, tmp_path: Path) -> None:
    folder, tensors = source
    lines = (
        "recipe.assign('text/output_head', format='q8_g32_fp16', method='grouped_absmax')",
        "recipe.assign('text/output_head', format='q4_g64_fp16', rows=(0, 32))",
        "recipe.assign('text/layers/*/mlp/*', format='q6_g64_fp16', method='grouped_absmax')",
        "recipe.separate('text/layers/0/mlp/up')",
        "recipe.group(['text/layers/1/attention/value', 'text/layers/1/attention/query'])",
        "recipe.share('text/layers/1/input_norm', 'text/layers/0/input_norm')",
        "recipe.use('text/layers/1/mlp/*', activation_policy='AllowA8')",
        "assert recipe.components == ('text',) and recipe.config['text']['hidden_size'] == 256",
        "assert recipe.stored('text/output_head') == 'bf16'",
    )
    convert(folder, tmp_path / "out.ninfer", recipe=_recipe(tmp_path, *lines, function="mine"))
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        head = artifact.parameter("text/output_head")
        assert [(artifact.tensor(p.object).format, artifact.tensor(p.object).shape) for p in head] == [
            ("q4_g64_fp16", (32, 256)),
            ("q8_g32_fp16", (96, 256)),
        ]
        up, gate = (artifact.parameter(f"text/layers/0/mlp/{n}")[0].object for n in ("up", "gate"))
        assert up != gate
        # Explicit groups come first and keep the order of their members.
        assert artifact.parameter("text/layers/1/attention/value")[0].object == "weight/000000"
        assert artifact.parameter("text/layers/1/attention/value")[0].begin == 0
        assert artifact.parameter("text/layers/1/attention/query")[0].begin == 128 * 256
        shared = [artifact.parameter(f"text/layers/{i}/input_norm") for i in (0, 1)]
        assert shared[0] == shared[1]
        assert list(artifact.bindings)[-1] == "text/layers/1/input_norm"
        assert _policies(artifact)["text/layers/1/mlp/down"] == "AllowA8"
        expected = expected_qwen(tensors, tiny.TILED)
        error = everything(artifact)["text/output_head"] - expected["text/output_head"].reshape(-1)
        assert float(error.square().mean().sqrt()) < 0.13 * 0.1


def test_override_runs_after_the_recipe(source: Source, tmp_path: Path) -> None:
    override = _recipe(tmp_path, "recipe.assign('text/token_embedding', format='bf16', method='cast_direct')")
    report = convert(source[0], tmp_path / "out.ninfer", recipe="groupwise-int", override=override)
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        assert _formats(artifact)["text/token_embedding"] == "bf16"
        assert _formats(artifact)["text/output_head"] == "q8_g32_fp16"
        assert artifact.provenance["override"] == override
    assert report.document["provenance"]["recipe"] == "groupwise-int"


FAULTS = [
    ("recipe.assign('text/nothing', format='bf16')", "matches no parameter"),
    ("recipe.assign('*/mlp/up', format='q4_g64_fp16')", "by the method cast_direct"),
    ("recipe.assign('*/mlp/up', format='q3')", "unknown weight format"),
    ("recipe.assign('*/mlp/up', layout='row_scale_v1')", "stored in contiguous_le_v1"),
    (
        "recipe.assign('*/mlp/up', method='import_encoded', format='nvfp4')",
        "the source 'base' holds it as bf16",
    ),
    ("recipe.assign('*/input_norm', format='fp32')", "can be stored as bf16 only"),
    ("recipe.assign('*/mlp/up', source='other')", "--source other=PATH"),
    ("recipe.assign('*/mlp/up', rows=(0, 1000))", "has 384"),
    ("recipe.use('*/mlp/up', activation_policy='AllowA2')", "unknown activation policy"),
    ("recipe.use('*/input_norm', activation_policy='AllowA8')", "its inputs are none"),
    ("recipe.use('*/mlp/up', auxiliaries={'x': 1})", "unknown auxiliary"),
    (
        "recipe.assign('*/mlp/up', format='nvfp4', method='nvfp4_mse'); recipe.use('*/mlp/up', "
        "activation_policy='AllowA4')",
        "no one positive activation divisor",
    ),
    ("recipe.share('*', 'text/final_norm')", "no parameter of this model"),
    ("recipe.share('text/final_norm', 'text/output_head')", "differ in shape"),
    ("recipe.share('text/output_head', 'text/output_head')", "a circle"),
    ("recipe.group(['*/layers/0/mlp/up'])", "two or more"),
    ("recipe.group(['*/layers/0/mlp/up', '*/layers/0/mlp/down'])", "rows of different kinds"),
    ("recipe.group(['*/0/mlp/up', '*/0/mlp/gate'], shape=(3, 5))", "cannot have the shape"),
    ("1 / 0", r"line 2\): ZeroDivisionError"),
]


@pytest.mark.parametrize(("line", "message"), FAULTS)
def test_faulty_recipes(source: Source, tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        convert(source[0], tmp_path / "out.ninfer", recipe=_recipe(tmp_path, line))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["recipe.py"]


def test_stated_divisor_reaches_the_use(source: Source, tmp_path: Path) -> None:
    lines = (
        "recipe.assign('*/mlp/up', format='nvfp4', method='nvfp4_absmax')",
        "recipe.use('*/mlp/up', activation_policy='AllowA4', auxiliaries={'activation_input_divisor': 12.5})",
    )
    convert(source[0], tmp_path / "out.ninfer", recipe=_recipe(tmp_path, *lines))
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        for use in artifact.uses:
            if use.parameter.endswith("mlp/up"):
                (part,) = use.auxiliaries["activation_input_divisor"]
                assert artifact.object_bytes(part.object).view("<f4").tolist() == [12.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "unknown recipe 'nothing'; known are bf16"),
        ("missing.py", "missing.py does not exist"),
        ("{file}:absent", "has no function 'absent'"),
    ],
)
def test_unknown_recipes(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text = text.format(file=_recipe(tmp_path, "pass"))
    with pytest.raises(ConversionError, match=message):
        convert(source[0], tmp_path / "out.ninfer", recipe=text)


@pytest.mark.parametrize("recipe", ["qwen3_6_27b_nvfp4", "qwen3_8_27b_nvfp4"])
def test_recipes_that_import_need_their_source(source: Source, tmp_path: Path, recipe: str) -> None:
    with pytest.raises(ConversionError, match="--source quantized=PATH"):
        convert(source[0], tmp_path / "out.ninfer", recipe=recipe)


def test_results_do_not_depend_on_chunks_or_workers(source: Source, tmp_path: Path) -> None:
    payloads = []
    settings: list[dict[str, int]] = [
        {"rows_per_chunk": 512, "workers": 1},
        {"rows_per_chunk": 128, "workers": 3},
    ]
    for index, setting in enumerate(settings):
        convert(source[0], tmp_path / f"{index}.ninfer", recipe="nvfp4-official", **setting)  # type: ignore[arg-type]
        with Artifact.open(tmp_path / f"{index}.ninfer") as artifact:
            payloads.append(artifact.read_range(0, artifact.payload_bytes))
    assert payloads[0] == payloads[1]
