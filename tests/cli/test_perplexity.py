"""`ninfer-perplexity`: its report against an independent computation, and what it refuses."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from ninfer import models
from ninfer.api.signature import prefill_signature
from ninfer.artifact import Artifact
from ninfer.cli import perplexity_report
from ninfer.cli.perplexity import main
from tests.models.smollm2 import windows
from tests.runtime.test_scoring import whole_pass

CONTEXT, STRIDE = 96, 40
TEXTS = {
    "a": ("prose", "All happy families are alike; every unhappy family is unhappy in its own way. " * 8),
    "b": ("code", "def f(x: int) -> int:\n    return x + 1\n\n" * 12),
    "c": ("prose", "Short."),
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, (_, text) in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    document = {
        "corpus_id": "test corpus",
        "streams": [{"id": n, "domain": d, "path": f"{n}.txt"} for n, (d, _) in TEXTS.items()],
        "modes": {"quick": ["b", "c"], "full": list(TEXTS)},
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


SMALL = ("--kv-dtype", "bf16", "--context", CONTEXT, "--stride", STRIDE)


def test_report_is_what_plain_passes_give(run, tiny: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "out"
    code, shown, _ = run(tiny, "--corpus", corpus, *SMALL, "--output", out)
    assert code == 0
    assert [path.name for path in out.iterdir()] == ["report.json"]
    text = (out / "report.json").read_text()
    report = json.loads(text)
    assert text == json.dumps(report, indent=2, sort_keys=True) + "\n"
    sums: dict[str, list[float]] = {"prose": [0, 0], "code": [0, 0]}
    assert [stream["id"] for stream in report["streams"]] == list(TEXTS)
    with Artifact.open(tiny) as artifact:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(artifact.resource("text", "tokenizer.json").decode())
        added = json.loads(artifact.resource("text", "tokenizer_config.json"))["added_tokens_decoder"]
        last = max(*tokenizer.get_vocab().values(), *map(int, added))
        model = models.load(artifact, public_tokens=last + 1)
        for stream in report["streams"]:
            domain, content = TEXTS[stream["id"]]
            ids = tokenizer.encode(content, add_special_tokens=False).ids
            plan = windows(len(ids), CONTEXT, STRIDE)
            assert (stream["domain"], stream["path"]) == (domain, f"{stream['id']}.txt")
            assert (stream["input_tokens"], stream["unscored_tokens"]) == (len(ids), 1)
            assert len(stream["windows"]) == len(plan)
            for index, (window, (begin, first, end)) in enumerate(zip(stream["windows"], plan, strict=True)):
                places = {
                    "index": index,
                    "input_begin": begin,
                    "input_end": end,
                    "target_begin": first,
                    "target_end": end,
                    "first_target": first - begin,
                    "scored_tokens": end - first,
                }
                assert {key: window[key] for key in places} == places
                nll = -float(whole_pass(model, ids[begin:end])[first - begin - 1 :].sum())
                assert window["total_nll"] == pytest.approx(nll, abs=0.002 * (end - first))
                sums[domain][0] += end - first
                sums[domain][1] += nll
    assert len(report["streams"][0]["windows"]) > 2
    assert [item["domain"] for item in report["domains"]] == ["code", "prose"]
    for item in (*report["domains"], {"domain": "overall", **report["overall"]}):
        parts = list(sums.values()) if item["domain"] == "overall" else [sums[item["domain"]]]
        tokens, nll = (sum(part[i] for part in parts) for i in (0, 1))
        assert item["scored_tokens"] == tokens
        assert item["mean_nll"] == pytest.approx(nll / tokens, abs=0.002)
    check_totals(report)
    check_table(shown, report, out)


def check_totals(report: dict) -> None:
    """Every aggregate is the sum of its parts, and its mean and perplexity are those of its sum."""
    streams = report["streams"]
    of_domain = [[s for s in streams if s["domain"] == d["domain"]] for d in report["domains"]]
    sums = [(report["overall"], streams), *zip(report["domains"], of_domain, strict=True)]
    sums += [(stream, stream["windows"]) for stream in streams]
    for whole, parts in sums:
        assert whole["scored_tokens"] == sum(part["scored_tokens"] for part in parts)
        assert whole["total_nll"] == pytest.approx(sum(part["total_nll"] for part in parts), rel=1e-14)
    for item in [whole for whole, _ in sums] + [window for stream in streams for window in stream["windows"]]:
        assert item["mean_nll"] == item["total_nll"] / item["scored_tokens"]
        assert item["perplexity"] == math.exp(item["mean_nll"])
    for stream in streams:
        assert stream["scored_tokens"] == stream["input_tokens"] - 1


def check_table(shown: str, report: dict, out: Path) -> None:
    lines = shown.splitlines()
    [header] = [i for i, line in enumerate(lines) if line.startswith("domain")]
    assert lines[header] == f"{'domain':<24}{'tokens':>16}{'mean_nll':>16}{'ppl':>16}"
    rows = [*report["domains"], {"domain": "overall", **report["overall"]}]
    assert lines[header + 1 : header + 1 + len(rows)] == [
        f"{r['domain']:<24}{r['scored_tokens']:>16}{r['mean_nll']:>16.6f}{r['perplexity']:>16.6f}"
        for r in rows
    ]
    assert lines[-1] == f"report {out / 'report.json'}"


def test_members_of_the_report(run, tiny: Path, corpus: Path, tmp_path: Path) -> None:
    assert run(tiny, "--corpus", corpus, *SMALL, "--output", tmp_path / "out")[0] == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["schema_version"] == 2
    assert report["metric"] == {
        "name": "fixed-window truncated-context causal perplexity",
        "log_base": "natural",
    }
    with Artifact.open(tiny) as artifact:
        signature = prefill_signature(artifact)
    assert report["artifact"] == {
        "path": str(tiny),
        "architecture": "Qwen3_5ForCausalLM",
        "name": "tiny",
        "prefill_signature": signature,
        "formats": ["bf16"],
    }
    assert report["corpus"] == {
        "id": "test corpus",
        "mode": "full",
        "source": str(corpus),
        "stream_count": 3,
    }
    assert report["execution"] == {
        "purpose": "causal_scoring",
        "device": "cpu",
        "context_tokens": CONTEXT,
        "stride_tokens": STRIDE,
        "prefill_chunk_tokens": 1024,
        "score_tile_tokens": 1024,
        "kv_dtype": "bf16",
    }
    timing = report["timing"]
    assert set(timing) == {
        "load_seconds",
        "read_and_tokenize_seconds",
        "score_seconds",
        "total_seconds",
        "scored_tokens_per_second",
    }
    parts = timing["load_seconds"] + timing["read_and_tokenize_seconds"] + timing["score_seconds"]
    assert 0 < parts <= timing["total_seconds"]
    rate = report["overall"]["scored_tokens"] / timing["score_seconds"]
    assert timing["scored_tokens_per_second"] == pytest.approx(rate)
    assert sum(stream["seconds"] for stream in report["streams"]) <= timing["score_seconds"]
    members = "schema_version metric artifact corpus execution timing overall domains streams"
    assert set(report) == set(members.split())


def test_quick_and_the_default_folder(run, tiny: Path, corpus: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, shown, _ = run(tiny, "--corpus", corpus, "--quick", *SMALL)
    assert code == 0
    [path] = Path("profiles").rglob("report.json")
    report = json.loads(path.read_text())
    assert report["corpus"]["mode"] == "quick"
    assert [stream["id"] for stream in report["streams"]] == ["b", "c"]
    parts = path.parts
    signature = report["artifact"]["prefill_signature"]
    assert parts[:-2] == ("profiles", "perplexity", "tiny", signature, "bf16", "test-corpus", "quick")
    assert re.fullmatch(r"\d{8}-\d{6}", parts[-2])
    assert shown.endswith(f"report {path}\n")


def test_one_text_file(run, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "my text.txt"
    text.write_text(TEXTS["a"][1])
    assert run(tiny, "--text", text, *SMALL, "--output", tmp_path / "out")[0] == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["corpus"]["id"] == "custom-my text.txt"
    assert [s["id"] for s in report["streams"]] == ["my text.txt"]
    check_totals(report)


def test_a_checkpoint_folder_is_converted(run, tiny: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("NINFER_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "t.txt"
    text.write_text(TEXTS["b"][1])
    nll = []
    for number, model in enumerate((tiny, tiny.parent / "checkpoint")):
        assert run(model, "--text", text, *SMALL, "--output", tmp_path / str(number))[0] == 0
        nll.append(json.loads((tmp_path / str(number) / "report.json").read_text())["overall"]["total_nll"])
    assert nll[0] == nll[1]


def test_kv_formats_are_named(run, tiny: Path, tmp_path: Path) -> None:
    """Without the option it is fp8."""
    text = tmp_path / "t.txt"
    text.write_text(TEXTS["b"][1])
    names = {"int8": "int8-g64", None: "fp8-e4m3-r256", "nvfp4": "nvfp4", "k8v4": "k8v4"}
    for kv, name in names.items():
        out = tmp_path / str(kv)
        options = () if kv is None else ("--kv-dtype", kv)
        code, _, _ = run(tiny, "--text", text, "--context", 96, "--stride", 40, "--output", out, *options)
        assert code == 0
        assert json.loads((out / "report.json").read_text())["execution"]["kv_dtype"] == name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "pass exactly one of --corpus or --text"),
        (("--corpus", "C", "--text", "T"), "pass exactly one of --corpus or --text"),
        (("--text", "T", "--quick"), "--quick needs --corpus"),
        (("--corpus", "C", "--context", 1), "--context must be at least 2 tokens, not 1"),
        (("--corpus", "C", "--context", 96), "--stride must be between 1 and 95 (below --context), not 2048"),
        (("--corpus", "C", "--stride", 0), "--stride must be between 1 and 4095"),
        (("--corpus", "C", "--stride", "x"), "'x' is not a whole number"),
        (("--corpus", "C", "--context", 513, "--stride", 8), "--context 513 is more than the 512 positions"),
        (("--corpus", "C", "--kv-dtype", "fp4"), "invalid KV format: fp4; use one of bf16, int8"),
        (("--corpus", "C", "--log-level", "loud"), "invalid log level: loud"),
        (("--corpus", "C", "--device", "tpu"), "--device must be cpu, cuda, cuda:N or auto, not 'tpu'"),
        (("--corpus", "C", "--tp", 2), "--tp is not available in this version: it waits for several GPUs"),
        (("--corpus", "C", "--devices", "0,1"), "--devices is not available"),
        (("--corpus", "C", "--embedding-host"), "--embedding-host is not available"),
        (("--corpus", "C", "--threads", 0), "threads must be a whole number between 1 and"),
        (("--corpus",), "--corpus needs a value"),
        (("--foo",), "unknown argument: --foo"),
        (("--corpus", "none.json"), "cannot read the corpus manifest none.json"),
        (("--text", "none.txt"), "cannot read the text none.txt"),
    ],
)
def test_refused(run, tiny: Path, corpus: Path, tmp_path: Path, monkeypatch, arguments, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "T").write_text("some text")
    values = [corpus if value == "C" else value for value in arguments]
    kv = () if "--kv-dtype" in arguments else ("--kv-dtype", "bf16")
    code, out, err = run(tiny, *kv, *values)
    assert (code, out) == (1, "")
    [sentence] = [line for line in err.splitlines() if line.startswith("ninfer-perplexity: ")]
    assert words in sentence
    assert "Traceback" not in err
    assert not Path("profiles").exists()


def test_an_output_folder_that_is_in_use_is_refused(run, tiny: Path, corpus: Path, tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    empty = run(tiny, "--corpus", corpus, *SMALL, "--output", used)
    assert empty[0] == 0
    kept = (used / "report.json").read_text()
    # Said before the model is looked at.
    code, out, err = run("none.ninfer", "--corpus", corpus, *SMALL, "--output", used)
    assert (code, out) == (1, "")
    assert err == f"ninfer-perplexity: the output folder {used} is not empty; choose another --output\n"
    assert (used / "report.json").read_text() == kept
    file = used / "report.json"
    assert "is not a folder" in run(tiny, "--corpus", corpus, *SMALL, "--output", file)[2]


def test_a_text_of_one_token_is_refused(run, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("a")
    code, out, err = run(tiny, "--text", text, *SMALL, "--output", tmp_path / "out")
    assert (code, out) == (1, "")
    assert err.endswith(f"the text {text} has 1 tokens; scoring needs at least 2\n")
    assert not (tmp_path / "out").exists()


def test_damaged_weights_are_said(run, tiny: Path, corpus: Path, tmp_path: Path, monkeypatch) -> None:
    from ninfer.models.qwen3_5.forward import Qwen35

    monkeypatch.setattr(
        Qwen35, "logits", lambda self, hidden: torch.full((len(hidden), self.public_tokens), float("nan"))
    )
    code, out, err = run(tiny, "--corpus", corpus, *SMALL, "--output", tmp_path / "out")
    assert (code, out) == (1, "")
    assert "the log-probability of token 1 of a window is nan" in err
    assert not (tmp_path / "out" / "report.json").exists()


def test_progress(run, tiny: Path, corpus: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(perplexity_report, "_INTERVAL", 1e9)
    silent = run(tiny, "--corpus", corpus, *SMALL, "--output", tmp_path / "0")
    assert silent[2] == ""
    monkeypatch.setattr(perplexity_report, "_INTERVAL", 0.0)
    _, _, err = run(tiny, "--corpus", corpus, *SMALL, "--output", tmp_path / "1")
    lines = err.splitlines()
    report = json.loads((tmp_path / "1" / "report.json").read_text())
    fed = sum(w["input_end"] - w["input_begin"] - 1 for s in report["streams"] for w in s["windows"])
    assert len(lines) == sum(len(stream["windows"]) for stream in report["streams"])
    assert lines[0].startswith(f"a: 95 of {fed:,} tokens, ")
    assert lines[-1].startswith(f"c: {fed:,} of {fed:,} tokens, ")
    quiet = run(tiny, "--corpus", corpus, *SMALL, "--output", tmp_path / "2", "--log-level", "warning")
    assert quiet[2] == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    _, _, err = run(tiny, "--corpus", corpus, *SMALL, "--output", tmp_path / "3")
    assert err.startswith("\r\033[Ka: 95 of ")
    assert err.endswith("\r\033[K")


def test_help(run) -> None:
    for flag in ("--help", "-h"):
        code, out, err = run(flag)
        assert (code, err) == (0, "")
        assert "bf16|int8|fp8|nvfp4|k8v4" in out
