"""What the commands of tools/nano say to wrong arguments: one sentence, no traceback, nothing written."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from ninfer.errors import NInferError
from tools.nano import batches, check, corpus, heldout, plot, tokenizer, train
from tools.nano.checkpoint import TOKENIZER

Main = Callable[[Sequence[str]], int]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A corpus of one word a file."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for domain in corpus.DOMAINS:
        (folder / f"train-{domain}.txt.xz").write_bytes(lzma.compress(b"word"))
        (folder / f"heldout-{domain}.txt").write_bytes(b"word")
    return folder


def _refused(main: Main, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize("main", [heldout.main, tokenizer.main, train.main, check.main])
def test_a_missing_corpus_is_named(main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--corpus", str(tmp_path / "none")]
    if main is not check.main:
        arguments += ["--out", str(tmp_path / "out")]
    if main is train.main:
        arguments += ["--leg", "0", "--steps", "1"]
    assert "make the corpus with python -m tools.nano.corpus" in _refused(main, arguments, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"text", lambda data: b""])
def test_a_damaged_corpus_is_named(damage: Callable[[bytes], bytes], texts: Path) -> None:
    path = texts / "train-code.txt.xz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(NInferError, match=r"train-code\.txt\.xz is damaged"):
        batches.read_texts(texts, "train")


LEG = {
    "steps": (["--steps", "0"], "--steps must be at least 1"),
    "seconds": (["--seconds", "nan"], "--seconds must be more than 0"),
    "workers": (["--workers", "0"], "--workers must be at least 1"),
    "short": (["--tokens", "8192"], "--tokens must be a multiple of 128 and at least 16384"),
    "odd": (["--tokens", "65600"], "--tokens must be a multiple of 128"),
    "later leg": (["--leg", "1"], "later legs need --resume"),
    "negative leg": (["--leg", "-1", "--resume", "x"], "later legs need --resume"),
    "no GPU": ([], "needs a CUDA device"),
}


@pytest.mark.parametrize("case", LEG)
def test_wrong_options_of_a_leg_are_named(
    case: str,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options, sentence = LEG[case]
    arguments = ["--corpus", str(texts), "--out", str(tmp_path / "out"), "--leg", "0", "--steps", "5"]
    assert sentence in _refused(train.main, arguments + options, capsys)
    assert not (tmp_path / "out").exists()


def test_a_leg_that_is_done_is_kept(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evaluation.json").write_text("{}")
    arguments = ["--corpus", str(texts), "--out", str(tmp_path), "--leg", "0", "--steps", "5"]
    assert "a leg that is done" in _refused(train.main, arguments, capsys)


def test_the_trained_model_s_tokenizer_is_kept(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--corpus", str(texts), "--out", str(TOKENIZER)]
    assert "belongs to the trained model" in _refused(tokenizer.main, arguments, capsys)


def test_a_silent_worker_is_an_error(monkeypatch: pytest.MonkeyPatch, texts: Path) -> None:
    monkeypatch.setattr(batches, "_PATIENCE", 0.01)
    monkeypatch.setattr(batches, "_work", lambda *_: None)
    workers = batches.Workers(texts, seed=0, leg=0, tokens=16_384, count=1)
    with pytest.raises(NInferError, match="no batch came"):
        next(iter(workers))
    workers.close()


def test_loss_curves_know_every_source_and_are_repeatable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = [name for sources in plot._GROUPS.values() for name in sources or ()]
    assert sorted(drawn) == sorted(train.SOURCES)

    pytest.importorskip("matplotlib")
    log = tmp_path / "log.jsonl"
    record = {"step": 50, "loss": 2.0, "mtp": 3.0, "sources": {"prose": 4.0}}
    log.write_text("".join(json.dumps({**record, "step": step}) + "\n" for step in (50, 100)))
    images = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for image in images:
        assert plot.main([str(log), "--out", str(image)]) == 0
    assert images[0].read_bytes() == images[1].read_bytes()
    assert "must end in" in _refused(plot.main, [str(log), "--out", str(tmp_path / "a.txt")], capsys)
    log.write_text('{"step": 50}\n')
    assert "line 1, is no record" in _refused(plot.main, [str(log), "--out", str(images[0])], capsys)
    missing = str(tmp_path / "none")
    assert f"{missing}: No such file" in _refused(plot.main, [missing, "--out", str(images[0])], capsys)
