"""The proposal head: which tokens, which rows, what the artifact says about it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ninfer.artifact import Artifact
from ninfer.convert import ProposalOptions, convert
from ninfer.convert.proposal import Tokens, choose, read_counts
from ninfer.errors import ConversionError

from . import exporter, tiny
from .logical import read

TOKENS = 70
SPECIAL: tuple[int, ...] = (0, 40, 69)


def _resources(folder: Path) -> None:
    vocab = {f"t{index}": index for index in range(TOKENS) if index != 69}
    added = [{"id": index, "content": f"t{index}", "special": index in SPECIAL} for index in (0, 7, 40)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": vocab}}))
    decoder = {"69": {"content": "t69", "special": True}}
    config = {"added_tokens_decoder": decoder, "chat_template": "x"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("hf")
    tensors = tiny.write_qwen(folder, has_mtp=True)
    _resources(folder)
    return folder, tensors


def _slowly(counts: list[int], rows: int) -> list[int]:
    """The selection word by word: forced ids, then the most frequent others, all by count."""
    if len(SPECIAL) >= rows:
        return sorted(sorted(SPECIAL), key=lambda index: -counts[index])[:rows]
    order = sorted(range(TOKENS), key=lambda index: (-counts[index], index))
    taken = [index for index in order if index not in SPECIAL][: rows - len(SPECIAL)]
    return sorted([*taken, *sorted(SPECIAL)], key=lambda index: -counts[index])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 32, 70])
@pytest.mark.parametrize("is_ranked", [False, True])
def test_tokens_and_rows(source, tmp_path: Path, rows: int, is_ranked: bool) -> None:
    folder, tensors = source
    counts = list(range(tiny.SMALL.vocab, 0, -1))
    ranking = None
    if is_ranked:
        counts = np.random.default_rng(3).integers(0, 20, tiny.SMALL.vocab).tolist()
        ranking = tmp_path / "counts.bin"
        ranking.write_bytes(np.array([counts, [0] * len(counts)], "<i8").tobytes())
    options = ProposalOptions(rows, ranking)
    convert(folder, tmp_path / "out.ninfer", components=("text", "mtp"), proposal=options)
    expected = _slowly(counts, rows)
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        record = artifact.components["text"].proposal
        assert record is not None
        assert (record.domain, record.rows) == ("indexed", rows)
        (part,) = artifact.parameter("proposal/token_ids")
        assert artifact.tensor(part.object).format == "int32"
        assert artifact.object_bytes(part.object).view("<i4").tolist() == expected
        (part,) = artifact.parameter("proposal/head")
        assert artifact.tensor(part.object).format == "q4_g64_fp16"
        head = tensors["lm_head.weight"].float()[expected]
        error = read(artifact, "proposal/head").reshape(rows, -1) - head
        assert float(error.abs().max()) <= float(head.abs().max()) / 14 * 1.01
        assert [use.input for use in artifact.uses if use.parameter == "proposal/head"] == [
            "mtp/final_hidden"
        ]
        assert list(artifact.bindings)[-2:] == ["proposal/head", "proposal/token_ids"]
        assert artifact.provenance.get("ranking") == (str(ranking) if ranking else None)


def test_from_a_quantized_gguf(source, tmp_path: Path) -> None:
    tensors = source[1]
    encode = exporter.quantized("Q8_0")
    exporter.write_qwen(tmp_path / "m.gguf", tensors, tiny.SMALL, has_mtp=True, encode=encode)
    options = ProposalOptions(4)
    convert(tmp_path / "m.gguf", tmp_path / "out.ninfer", components=("text", "mtp"), proposal=options)
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        (part,) = artifact.parameter("proposal/head")
        assert artifact.tensor(part.object).format == "q4_g64_fp16"


@pytest.mark.parametrize(
    ("counts", "special", "rows", "expected"),
    [
        pytest.param([5, 5, 0, 9, 5, 1, 0, 3, 99, 99], {2, 7}, 5, [3, 0, 1, 7, 2], id="rows-of-no-token"),
        pytest.param([4, 4, 4, 4], {0}, 3, [1, 2, 0], id="equal-counts-forced-last"),
        pytest.param([4, 4, 4, 4], {0, 3}, 4, [1, 2, 0, 3], id="all-tokens"),
        pytest.param([9, 2, 9, 7, 9, 2], {1, 3, 5}, 2, [3, 1], id="more-forced-than-rows"),
        pytest.param([9, 2, 9, 7, 9, 2], {1, 3, 5}, 3, [3, 1, 5], id="as-many-forced-as-rows"),
        pytest.param([0, 0, 0, 0, 1], set(), 3, [4, 0, 1], id="never-counted-by-id"),
        pytest.param([0, 0, 7, 0, 1], {1}, 4, [2, 4, 0, 1], id="never-counted-before-forced"),
        pytest.param([1, 2**62, 2**63 - 1], set(), 2, [2, 1], id="large-counts"),
        pytest.param([3, 1, 2], {1}, 1, [1], id="one-row-is-forced"),
    ],
)
def test_the_rule(counts: list[int], special: set[int], rows: int, expected: list[int]) -> None:
    tokens = Tokens(min(len(counts), 8), frozenset(special))
    assert choose(np.array(counts), tokens, rows).tolist() == expected


def test_the_usual_size_is_clipped_to_the_vocabulary(source, tmp_path: Path) -> None:
    report = convert(source[0], tmp_path / "o.ninfer", components=("text", "mtp"), proposal=ProposalOptions())
    with Artifact.open(report.path) as artifact:
        record = artifact.components["text"].proposal
        assert record is not None
        assert record.rows == TOKENS
    assert Tokens(248_077, frozenset()).rows(None) == 131_072


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros(10, "<i8").tobytes(), "nothing but zeros"),
        (np.array([1] * 9 + [-1], "<i8").tobytes(), "negative count for token 9"),
        (b"", "has 0 bytes; it must hold rows of 10 8-byte counts, one for each row of the model's"),
        (bytes(81), "has 81 bytes"),
        (None, "cannot be read: No such file"),
    ],
)
def test_rankings_that_are_none(tmp_path: Path, data: bytes | None, message: str) -> None:
    path = tmp_path / "counts"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConversionError, match=message):
        read_counts(path, 10)
    with pytest.raises(ConversionError, match="is no regular file"):
        read_counts(tmp_path, 10)


@pytest.mark.parametrize(
    ("components", "rows", "size", "message"),
    [
        (("text",), 8, None, "serves a draft component"),
        (("text", "mtp"), 71, None, "from 1 to 70 rows, as many as the tokenizer has tokens, not 71"),
        (("text", "mtp"), 8, 100, "has 100 bytes; it must hold rows of 80 8-byte counts"),
    ],
)
def test_faults(source, tmp_path: Path, components, rows: int, size: int | None, message: str) -> None:
    ranking = None
    if size is not None:
        ranking = tmp_path / "counts.bin"
        ranking.write_bytes(bytes(size))
    with pytest.raises(ConversionError, match=message):
        convert(
            source[0], tmp_path / "out.ninfer", components=components, proposal=ProposalOptions(rows, ranking)
        )
    assert not list(tmp_path.glob("*out.ninfer*"))
