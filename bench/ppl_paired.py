"""Does a candidate predict worse than a reference? Two reports of `ninfer-perplexity`, window by window.

    python -m bench.ppl_paired REFERENCE.json CANDIDATE.json [--alpha 0.05] [--max-delta 0.5]

Windows are paired, so what they have in common drops out: with x = total -log p of the candidate less that of
the reference, over n windows of N tokens, d = sum(x) / N is the change of the mean, sqrt(n) stdev(x) / N its
standard error, and t their ratio, judged two-sided by Student's distribution of n - 1 degrees of freedom. A
sign test over the windows stands beside it.

The first line begins with the verdict: PASS; WARN if the candidate is worse at significance `alpha` or the
perplexity changed by `max-delta` per cent or more; FAIL, exit code 1, if the reports don't have the same
windows. The second line is the change in each domain. Only the standard library is used.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Windows = dict[tuple[str, int], tuple[int, float, str]]
"""(stream id, window index) -> scored tokens, total -log p, domain."""


class Unpaired(Exception):
    """The reports can't be compared; the text says why."""


@dataclass(frozen=True)
class Comparison:
    """`change`, `low`, `high`: of the perplexity, in per cent, with its 95 % interval."""

    reference: float
    candidate: float
    change: float
    low: float
    high: float
    t: float
    p: float
    windows: int
    positive: int
    negative: int
    sign_p: float
    domains: dict[str, float]

    def verdict(self, alpha: float, max_delta: float) -> str:
        if self.positive == self.negative == 0:
            return "PASS identical"
        worse = self.change > 0 and self.p <= alpha
        return "WARN" if worse or abs(self.change) >= max_delta else "PASS"


def compare(reference: Windows, candidate: Windows) -> Comparison:
    """The paired test; `Unpaired` unless both have the same windows with the same numbers of tokens."""
    if not reference:
        raise Unpaired("the reference has no windows")
    if reference.keys() != candidate.keys():
        stream, index = min(reference.keys() ^ candidate.keys())
        raise Unpaired(f"only one report has window {index} of stream {stream}")
    for key, (tokens, _, _) in reference.items():
        if candidate[key][0] != tokens:
            raise Unpaired(
                f"window {key[1]} of stream {key[0]} scores {tokens} tokens in the reference and "
                f"{candidate[key][0]} in the candidate"
            )
    x = [candidate[key][1] - nll for key, (_, nll, _) in reference.items()]
    n, total = len(x), sum(tokens for tokens, _, _ in reference.values())
    d = math.fsum(x) / total
    error = math.sqrt(n) * statistics.stdev(x) / total if n > 1 else 0.0
    t = d / error if error else math.copysign(math.inf, d) if d else 0.0
    margin = quantile(n - 1) * error if error else 0.0
    positive, negative = sum(v > 0 for v in x), sum(v < 0 for v in x)
    domains: dict[str, list[float]] = {}
    for key, (tokens, nll, domain) in sorted(reference.items()):
        sums = domains.setdefault(domain, [0.0, 0.0])
        sums[0] += candidate[key][1] - nll
        sums[1] += tokens
    return Comparison(
        reference=math.exp(math.fsum(nll for _, nll, _ in reference.values()) / total),
        candidate=math.exp(math.fsum(nll for _, nll, _ in candidate.values()) / total),
        change=_percent(d),
        low=_percent(d - margin),
        high=_percent(d + margin),
        t=t,
        p=two_sided(t, n - 1),
        windows=n,
        positive=positive,
        negative=negative,
        sign_p=sign_test(positive, negative),
        domains={domain: _percent(change / tokens) for domain, (change, tokens) in sorted(domains.items())},
    )


def read(path: Path) -> Windows:
    """The windows of a report."""
    try:
        report = json.loads(path.read_bytes())
        windows = {
            (str(stream["id"]), int(window["index"])): (
                int(window["scored_tokens"]),
                float(window["total_nll"]),
                str(stream["domain"]),
            )
            for stream in report["streams"]
            for window in stream["windows"]
        }
    except OSError as error:
        raise Unpaired(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise Unpaired(f"{path} is no report of ninfer-perplexity") from None
    for (stream, index), (tokens, nll, _) in windows.items():
        if tokens < 1 or not math.isfinite(nll):
            raise Unpaired(f"{path} has {tokens} tokens and a sum of {nll} in window {index} of {stream}")
    return windows


def two_sided(t: float, freedom: int) -> float:
    """Probability of a Student variable at least as far from 0 as `t`."""
    if math.isinf(t):
        return 0.0
    return incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5) if t else 1.0


def quantile(freedom: int, tail: float = 0.05) -> float:
    """The t that is exceeded two-sided with probability `tail`."""
    low, high = 0.0, 1.0
    while two_sided(high, freedom) > tail:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if two_sided(middle, freedom) > tail else (low, middle)
    return high


def incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), 0 <= x <= 1, by its continued fraction."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction of the mirrored argument converges fast
        return 1 - incomplete_beta(1 - x, b, a)
    factor = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    # Evaluated from the tail: I = factor / a / (1 + d1 / (1 + d2 / (1 + ...))).
    value = 1.0
    for m in range(1000, 0, -1):
        half = m // 2
        if m % 2:
            d = -(a + half) * (a + b + half) * x / ((a + m - 1) * (a + m))
        else:
            d = half * (b - half) * x / ((a + m - 1) * (a + m))
        value = 1 + d / value
    return math.exp(factor) / (a * value)


def sign_test(positive: int, negative: int) -> float:
    """Two-sided probability of signs at least as uneven, if both were equally likely."""
    n = positive + negative
    few = sum(math.comb(n, j) for j in range(min(positive, negative) + 1))
    return min(1.0, 2 * few / 2**n) if n else 1.0


def _percent(d: float) -> float:
    return 100 * math.expm1(d)


def main(argv: Sequence[str] | None = None) -> int:
    """0 for PASS and WARN, 1 for FAIL."""
    parser = argparse.ArgumentParser(
        prog="ppl_paired", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reference", type=Path)
    parser.add_argument("candidate", type=Path)
    parser.add_argument("--alpha", type=float, default=0.05, help="significance (0.05)")
    parser.add_argument("--max-delta", type=float, default=0.5, help="per cent of perplexity (0.5)")
    options = parser.parse_args(argv)
    try:
        c = compare(read(options.reference), read(options.candidate))
    except Unpaired as error:
        print(f"FAIL {error}")
        return 1
    print(
        f"{c.verdict(options.alpha, options.max_delta)}: perplexity {c.reference:.6f} -> {c.candidate:.6f}, "
        f"change {c.change:+.4f} % (95 % interval {c.low:+.4f} to {c.high:+.4f}), t {c.t:.3f}, p {c.p:.4g}, "
        f"n {c.windows}, signs +{c.positive} -{c.negative}, sign p {c.sign_p:.4g}"
    )
    print("domains: " + ", ".join(f"{domain} {change:+.4f} %" for domain, change in c.domains.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
