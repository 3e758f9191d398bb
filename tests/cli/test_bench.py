"""`ninfer-bench` on a synthetic model: kinds of tests, reports, refusals and exit codes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from ninfer.api.throughput import Case, cases, mean_and_deviation, random_ids
from ninfer.cli.bench import main
from ninfer.cli.bench_report import _CSV

MODEL = "synthetic:tiny/quasar"
FAST = ["--log-level", "warning", "--device", "cpu", "--warmup", "0"]


def report(tmp_path: Path, *arguments: str) -> dict:
    out = tmp_path / "report.json"
    assert main([MODEL, *FAST, "-o", "json", "--output-file", str(out), *arguments]) == 0
    return json.loads(out.read_text())


def test_labels_and_sizes():
    found = cases([64], [8, 16], [(50, 6)], depths=[0, 100], concurrencies=[1, 4])
    assert [case.label for case in found] == [
        "pp64",
        *("tg8", "tg8 x4", "tg8 @ d100", "tg8 @ d100 x4"),
        *("tg16", "tg16 x4", "tg16 @ d100", "tg16 @ d100 x4"),
        "pp50+tg6",
    ]
    assert [case.kind for case in found[:2]] == ["pp", "tg"]
    assert found[-1].kind == "pp+tg"
    deep = Case(generated=8, depth=100)
    assert (deep.prompt_tokens, deep.output_tokens, deep.context) == (100, 9, 108)
    assert (found[0].prompt_tokens, found[0].output_tokens, found[0].context) == (64, 1, 64)


def test_statistics():
    assert mean_and_deviation([2.0, 4.0]) == (3.0, pytest.approx(2**0.5))
    assert mean_and_deviation([2.0]) == (2.0, 0.0)
    assert mean_and_deviation([]) == mean_and_deviation([1.0, None]) == (None, None)
    ids = random_ids(300, [7, 8], 5000)
    assert ids == random_ids(300, [7, 8], 5000)
    assert set(ids) == set(range(300)) - {7, 8}


def test_json_report(tmp_path: Path):
    found = report(
        tmp_path, "-p", "40", "-n", "6", "-d", "0,70", "-pg", "30,4", "-r", "2", "--kv-dtype", "int8"
    )
    assert (found["schema_version"], found["artifact_type"]) == (15, "ninfer_bench_report")
    assert found["tool"] == "ninfer_bench"
    assert found["load"]["architecture"] == "Qwen3_5ForCausalLM"
    assert found["load"]["weight_formats"] == ["bf16", "fp8_e4m3fn_row_bf16", "nvfp4"]
    assert found["config"]["kv_cache"] == "int8-group64"
    assert found["config"]["max_context"] == 76
    assert found["config"]["decode_path"] == "eager"
    assert found["memory"]["workspace"]["capacity_bytes"] > 0
    prefill, decode, deep, both = found["tests"]
    assert [test["label"] for test in found["tests"]] == ["pp40", "tg6", "tg6 @ d70", "pp30+tg4"]
    assert prefill["prefill_tok_s_mean"] > 0
    assert prefill["decode_output_tok_s_mean"] is None
    assert decode["prefill_tok_s_mean"] is None
    assert decode["decode_output_tok_s_mean"] > 0
    assert both["prefill_tok_s_mean"] > 0
    assert both["decode_output_tok_s_mean"] > 0
    for test in found["tests"]:
        assert len(test["reps"]) == 2
        assert test["speculative"]["enabled"] is False
    for rep in decode["reps"]:
        assert (rep["generated_output_tokens"], rep["decode_output_tokens"]) == (7, 6)
        assert rep["decode_engine_tokens"] == 6
        seconds = rep["timings"]
        assert 0 < seconds["decode_seconds"] < seconds["total_seconds"]
    assert (decode["n_prompt"], deep["n_prompt"], deep["depth"]) == (1, 70, 70)
    assert 0 < decode["decode_host_share_mean"] < 1
    assert decode["ms_per_round_mean"] == pytest.approx(
        1e3 * sum(rep["timings"]["decode_seconds"] for rep in decode["reps"]) / 12
    )


def test_several_requests_at_a_time(tmp_path: Path):
    found = report(tmp_path, "-n", "12", "--concurrency", "1,3", "-r", "1")
    alone, together = found["tests"]
    assert (alone["concurrency"], together["concurrency"]) == (1, 3)
    assert alone["average_batch_mean"] == 1
    assert 2 < together["average_batch_mean"] <= 3
    assert together["reps"][0]["generated_output_tokens"] == 39
    assert found["config"]["max_concurrency"] == 3


def test_table_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([MODEL, "-p", "40", "-n", "4", "-r", "1", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("tiny-quasar-synthetic: ")
    assert lines[2].split()[:3] == ["test", "n_prompt", "n_gen"]
    assert [line.split()[0] for line in lines[3:]] == ["pp40", "tg4"]
    assert "tg4: decode" in err
    file = tmp_path / "report.csv"
    assert (
        main(["--weights", MODEL, *FAST, "-n", "4", "-r", "1", "-o", "csv", "--output-file", str(file)]) == 0
    )
    assert capsys.readouterr() == ("", "")
    rows = list(csv.DictReader(file.open()))
    assert tuple(rows[0]) == _CSV
    assert (rows[0]["label"], rows[0]["n_gen"], rows[0]["repetitions"]) == ("tg4", "4", "1")
    assert float(rows[0]["decode_output_tok_s_mean"]) > 0
    assert rows[0]["prefill_tok_s_mean"] == ""


def test_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ids = tmp_path / "corpus.ids"
    ids.write_text("5 6 7\n8\n")
    found = report(tmp_path, "-p", "40", "-r", "1", "--corpus", str(ids))
    assert (found["config"]["corpus_path"], found["config"]["corpus_tokens"]) == (str(ids), 4)
    ids.write_text("5 6 500\n")
    assert main([MODEL, *FAST, "-p", "4", "--corpus", str(ids)]) == 2
    assert "has the id 500, but the model's tokenizer knows only 500" in capsys.readouterr().err
    ids.write_text("five")
    assert main([MODEL, *FAST, "-p", "4", "--corpus", str(ids)]) == 2
    assert "must be decimal token ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the model, either as MODEL or with --weights"),
        ([MODEL, "--weights", MODEL], "name the model, either as MODEL or with --weights"),
        ([MODEL, "-p", "12,x"], "--n-prompt must be whole numbers with commas between, not '12,x'"),
        ([MODEL, "-n", "0"], "--n-gen must be between 1 and 16777216, not 0"),
        ([MODEL, "-pg", "12"], "--prompt-gen must be pairs"),
        ([MODEL, "-p", "12", "-d", "5"], "--depth and --concurrency are about decoding"),
        ([MODEL, "-n", "4", "--concurrency", "9"], "--concurrency must be between 1 and 8, not 9"),
        ([MODEL, "-n", "4", "-r", "0"], "--repetitions must be at least 1, not 0"),
        ([MODEL, "-n", "4", "--max-ctx", "4"], "--max-ctx must be at least 5 for tg4, not 4"),
        ([MODEL, "-o", "xml"], "invalid --output: xml"),
        ([MODEL, "--kv-dtype", "int2"], "invalid --kv-dtype: int2"),
        ([MODEL, "--prefill-chunk", "100"], "--prefill-chunk must be a positive multiple of 128, not 100"),
        ([MODEL, "--profile-measured"], "--profile-measured needs exactly one test and -r 1"),
        ([MODEL, "-n", "4", "--output-file", "/nowhere/at/all"], "the folder /nowhere/at of --output-file"),
        ([MODEL, "-n", "4", "--spec", "mtp"], "--spec mtp requires --draft-tokens in [1, 5]"),
        ([MODEL, "-n", "4", "--draft-tokens", "3"], "--draft-tokens and --lm-head-draft require --spec mtp"),
        ([MODEL, "-n", "4", "--spec", "fast", "--draft-tokens", "3"], "invalid speculative backend: fast"),
        ([MODEL, "--mtp-draft-tokens", "6"], "--spec mtp requires --draft-tokens in [1, 5]"),
        ([MODEL, "--assume-acceptance", "0.5"], "--assume-acceptance requires --spec mtp"),
        ([MODEL, "--assume-acceptance", "7", "--mtp-draft-tokens", "1"], "must be between 0 and 1, not 7"),
        ([MODEL, "--lm-head-draft"], "--draft-tokens and --lm-head-draft require --spec mtp"),
        (["synthetic:tiny/x"], "there is no model 'synthetic:tiny/x'"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_a_failed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path / "missing.ninfer")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_drafts_are_reported_and_assumptions_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    asked = [f"{MODEL}+mtp", *FAST, "-n", "12", "-r", "1", "--spec", "mtp", "--draft-tokens", "3"]
    path = tmp_path / "report.json"
    assert main([*asked, "-o", "json", "--output-file", str(path)]) == 0
    found = json.loads(path.read_text())
    assert (found["config"]["speculative_backend"], found["config"]["draft_tokens"]) == ("mtp", 3)
    [test] = found["tests"]
    speculative = test["speculative"]
    assert speculative["enabled"]
    assert speculative["rounds"] + speculative["fallback_steps"] + speculative["accepted_tokens"] == 12
    assert len(speculative["accepted_per_position"]) == speculative["draft_window"] == 3
    assert speculative["drafted_tokens"] > 12
    histogram, positions = speculative["accepted_length_histogram"], speculative["accepted_per_position"]
    assert (len(histogram), sum(histogram)) == (4, speculative["rounds"])
    assert positions == [sum(histogram[1 + index :]) for index in range(3)]
    assert sum(positions) == speculative["accepted_tokens"]
    assert test["assumed_decode_tok_s"] is None
    capsys.readouterr()
    assert main([*asked, "--assume-acceptance", "0.5"]) == 0
    assert "ASSUMING 50 % accepted" in capsys.readouterr().out
