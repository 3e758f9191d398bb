"""The paired test of two perplexity reports, against SciPy and against cases worked out by hand."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from scipy import special, stats

from bench.ppl_paired import compare, incomplete_beta, main, quantile, read, sign_test, two_sided


def windows(totals: list[float], tokens: int = 100):
    return {("a" if i % 2 else "b", i): (tokens + i, x, "d" + str(i % 2)) for i, x in enumerate(totals)}


def write(path: Path, totals: dict) -> Path:
    streams = [
        {
            "id": stream,
            "domain": domain,
            "windows": [{"index": index, "scored_tokens": tokens, "total_nll": nll}],
        }
        for (stream, index), (tokens, nll, domain) in totals.items()
    ]
    path.write_text(json.dumps({"streams": streams}))
    return path


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [2, 4, 16, 124, 496])
def test_figures_are_scipys(n: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    old = draw.normal(200, 30, n)
    new = old + draw.normal(0.05 * seed, 0.5, n)
    result = compare(windows(old.tolist()), windows(new.tolist()))
    test = stats.ttest_rel(new, old)
    total = sum(100 + i for i in range(n))
    assert result.t == pytest.approx(test.statistic, rel=1e-7)
    assert result.p == pytest.approx(test.pvalue, rel=1e-7)
    interval = test.confidence_interval(0.95)
    low, high = (100 * math.expm1(bound * n / total) for bound in (interval.low, interval.high))
    assert (result.low, result.high) == pytest.approx((low, high), rel=1e-7)
    assert result.candidate / result.reference - 1 == pytest.approx(result.change / 100, rel=1e-6)
    signs = stats.binomtest(int((new > old).sum()), n).pvalue
    assert result.sign_p == pytest.approx(signs, rel=1e-9)


def test_incomplete_beta_and_quantile() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        freedom, t = rng.randint(1, 5000), rng.choice([-1, 1]) * 10 ** rng.uniform(-6, 3)
        expected = special.betainc(freedom / 2, 0.5, freedom / (freedom + t * t))
        assert two_sided(t, freedom) == pytest.approx(expected, rel=1e-9, abs=1e-290)
    for freedom in (1, 2, 3, 15, 123, 495):
        assert quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-12)
    assert (incomplete_beta(0, 2, 3), incomplete_beta(1, 2, 3)) == (0, 1)
    assert two_sided(0.0, 3) == 1


def test_signs_by_hand() -> None:
    assert sign_test(0, 0) == 1
    assert sign_test(3, 3) == 1
    assert sign_test(1, 4) == sign_test(4, 1) == 2 * (1 + 5) / 32


def test_verdicts() -> None:
    old = [100.0, 110.0, 120.0, 130.0]

    def verdict(change: list[float]) -> str:
        new = [a + b for a, b in zip(old, change, strict=True)]
        return compare(windows(old), windows(new)).verdict(0.05, 0.5)

    assert verdict([0, 0, 0, 0]) == "PASS identical"
    assert verdict([0.01, -0.01, 0.02, 0.01]) == "PASS"  # worse, but not significantly
    assert verdict([0.1, 0.11, 0.1, 0.12]) == "WARN"  # significantly worse by 0.1 %
    assert verdict([-0.1, -0.11, -0.1, -0.12]) == "PASS"  # significantly better
    assert verdict([-1.0, -1.1, -0.2, -0.9]) == "WARN"  # better, but by more than 0.5 %
    assert verdict([3.0, -4.0, 5.0, -1.0]) == "WARN"  # not significant, but more than 0.5 %


def test_no_spread_counts_as_certain() -> None:
    result = compare(windows([100.0, 100.0]), windows([100.25, 100.25]))
    assert (result.p, result.low, result.high) == (0, result.change, result.change)
    assert result.verdict(0.05, 0.5) == "WARN"
    single = compare(windows([100.0]), windows([99.75]))
    assert (single.p, single.verdict(0.05, 0.5)) == (0, "PASS")


def test_domains_are_averaged_by_tokens() -> None:
    result = compare(windows([100, 100, 100.0]), windows([101, 100, 103.0]))
    assert result.domains == pytest.approx({"d0": 100 * math.expm1(4 / 202), "d1": 0})


def test_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "old.json", windows([100.0, 110.0, 120.0]))
    new = write(tmp_path / "new.json", windows([100.1, 110.1, 120.2]))
    assert main([str(old), str(old)]) == 0
    assert capsys.readouterr().out.startswith("PASS identical: perplexity 2.971625 -> 2.971625")
    assert main([str(old), str(new)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("PASS: perplexity 2.971625 -> 2.975550, change +0.1321 % ")
    assert first.endswith("t 4.000, p 0.05719, n 3, signs +3 -0, sign p 0.25")
    assert second.startswith("domains: d0 +0.")
    for stricter in (["--alpha", "0.06"], ["--max-delta", "0.13"]):
        assert main([str(old), str(new), *stricter]) == 0
        assert capsys.readouterr().out.startswith("WARN: ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop(("a", 1)), "only one report has window 1 of stream a"),
        (lambda w: w.update({("c", 0): (1, 1.0, "d")}), "window 0 of stream c"),
        (lambda w: w.update({("a", 1): (99, 110.0, "d1")}), "scores 101 tokens in the reference and 99"),
    ],
)
def test_different_windows_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str], change, words) -> None:
    totals = windows([100.0, 110.0, 120.0])
    old = write(tmp_path / "old.json", totals)
    change(totals)
    new = write(tmp_path / "new.json", totals)
    assert main([str(old), str(new)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("FAIL ")
    assert words in out


def test_what_is_no_report_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good.json", windows([100.0]))
    assert read(good) == {("b", 0): (100, 100.0, "d0")}
    for text in ("", "[]", "{}", '{"streams": [{"id": "a"}]}', '{"streams": []}'):
        bad = tmp_path / "bad.json"
        bad.write_text(text)
        assert main([str(bad), str(good)]) == 1
    assert main([str(tmp_path / "none.json"), str(good)]) == 1
    assert capsys.readouterr().out.count("FAIL ") == 6
