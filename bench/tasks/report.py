"""What the runs of each model and KV format add up to: the report of a task benchmark, before it is shown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import groupby
from statistics import NormalDist, fmean
from typing import Any

from bench.tasks.run import GroupRuns, Outcome, Run, Subject
from bench.tasks.suite import Group
from ninfer.api import EngineDescription
from ninfer.errors import OptionError

SCHEMA = 1
CALL_FORM = "call_form"
"""What `--require` calls the share of well-formed calls, right or not, where calls are the answer."""
_Z = NormalDist().inv_cdf(0.975)
_REQUIRE = re.compile(r"\s*([\w.-]+)\s*>=\s*(\d+(?:\.\d+)?|\.\d+)(\s*%)?\s*")


@dataclass(frozen=True)
class Requirement:
    """A share of passed runs that a task or a category must reach in every combination."""

    name: str
    share: Fraction


@dataclass(frozen=True)
class Combination:
    """All runs of one model with one KV format; `seconds` from the first request to the last answer."""

    model: Subject
    engine: EngineDescription
    concurrency: int
    groups: tuple[GroupRuns, ...]

    @property
    def label(self) -> str:
        return f"{self.model.label}/{self.engine.kv_dtype}"


def requirement(text: str) -> Requirement:
    """`NAME>=SHARE`, the share as 0.95 or 95%. Raises OptionError."""
    match = _REQUIRE.fullmatch(text)
    share = Fraction(match[2]) / (100 if match[3] else 1) if match else None
    if match is None or share is None or share > 1:
        raise OptionError(
            f"--require {text!r:.80} must be NAME>=SHARE with a share from 0 to 1, as kv2048>=0.95"
        )
    return Requirement(match[1], share)


def check_requirements(requirements: Sequence[Requirement], groups: Sequence[Group]) -> None:
    """OptionError unless every requirement is about something that is run."""
    names = [group.name for group in groups]
    names += dict.fromkeys(group.category for group in groups)
    if any(task.answer.get("tool_calls") for group in groups for task in group.tasks):
        names.append(CALL_FORM)
    for item in requirements:
        if item.name not in names:
            raise OptionError(f"--require {item.name}: it isn't run; what is run: {', '.join(names)}")


def wilson(passed: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    if total == 0:
        return 0.0, 1.0
    share, z2 = passed / total, _Z * _Z
    centre = share + z2 / (2 * total)
    width = _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    low, high = ((centre + sign * width) / (1 + z2 / total) for sign in (-1, 1))
    return (0.0 if passed == 0 else low), (1.0 if passed == total else high)


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided p that `lost` and `gained` of the discordant pairs differ by chance."""
    pairs = lost + gained
    tail = sum(math.comb(pairs, k) for k in range(min(lost, gained) + 1))
    return min(1.0, float(Fraction(2 * tail, 2**pairs)))


def document(
    combinations: Sequence[Combination],
    groups: Sequence[Group],
    requirements: Sequence[Requirement],
    **facts: Any,
) -> dict[str, Any]:
    """The report, schema 1; `facts` (command, time, environment, options) stand in it as they are."""
    parts = [_combination(combination) for combination in combinations]
    return {
        "schema_version": SCHEMA,
        "tool": "bench.tasks",
        **facts,
        "tasks": [
            {"name": group.name, "category": group.category, "instances": len(group.tasks)}
            for group in groups
        ],
        "combinations": parts,
        "paired": [_paired(combinations[0], other) for other in combinations[1:]],
        "requirements": [_verdict(item, part) for item in requirements for part in parts],
    }


def aggregate(runs: Iterable[GroupRuns]) -> dict[str, Any]:
    """What groups of runs add up to. Tokens per round and acceptance are ratios of sums (acceptance None if
    nothing was drafted); rates are means of the requests' own."""
    groups = list(runs)
    each = [run for group in groups for run in group.runs]
    passed, total = sum(run.outcome is Outcome.PASSED for run in each), len(each)
    low, high = wilson(passed, total)
    rounds = sum(run.rounds for run in each)
    drafted, accepted = (sum(getattr(group, name) for group in groups) for name in ("drafted", "accepted"))
    return {
        "passed": passed,
        "total": total,
        "share": passed / total,
        "wilson_low": low,
        "wilson_high": high,
        "outcomes": {str(kind): sum(run.outcome is kind for run in each) for kind in Outcome},
        "calls_expected": sum(run.calls_expected for run in each),
        "calls_formed": sum(run.calls_expected and bool(run.reply.tool_calls) for run in each),
        "prompt_tokens": sum(run.prompt_tokens for run in each),
        "completion_tokens": sum(run.completion_tokens for run in each),
        "rounds": rounds,
        "tokens_per_round": sum(run.completion_tokens - 1 for run in each) / rounds if rounds else 1.0,
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance": accepted / drafted if drafted else None,
        "prefill_tok_s": _mean(run.prefill_tok_s for run in each),
        "decode_tok_s": _mean(run.decode_tok_s for run in each),
        "seconds": math.fsum(group.seconds for group in groups),
    }


def unmet(report: Mapping[str, Any]) -> list[str]:
    """A sentence for every requirement that isn't met."""
    return [
        f"{item['name']} must reach {item['share']:.2%} but {item['combination']} passes "
        f"{item['passed']} of {item['total']}"
        for item in report["requirements"]
        if not item["met"]
    ]


def _combination(combination: Combination) -> dict[str, Any]:
    model, engine = combination.model, combination.engine
    whole = aggregate(combination.groups)
    return {
        "label": combination.label,
        "model": model.label,
        "kv_dtype": engine.kv_dtype,
        "artifact": {
            "path": str(model.path),
            "name": model.name,
            "architecture": model.architecture,
            "prefill_signature": model.signature,
            "formats": list(model.formats),
            "size_bytes": model.size_bytes,
        },
        "engine": {
            "device": engine.device,
            "threads": engine.threads,
            "concurrency": combination.concurrency,
            "max_context": engine.max_context,
            "kv_tokens": engine.kv_tokens,
            "kv_bytes": engine.kv_bytes,
            "load_seconds": engine.load_seconds,
        },
        "overall": {**whole, "output_tok_s": whole["completion_tokens"] / whole["seconds"]},
        "categories": [
            {"category": category, **aggregate(members)}
            for category, members in groupby(combination.groups, key=lambda group: group.category)
        ],
        "tasks": [
            {
                "name": group.name,
                "category": group.category,
                **aggregate([group]),
                "runs": [_run(run) for run in group.runs],
            }
            for group in combination.groups
        ],
    }


def _run(run: Run) -> dict[str, Any]:
    fields = asdict(run)
    del fields["reply"]
    return {
        **fields,
        "tokens_per_round": run.tokens_per_round,
        "content": run.reply.content,
        "reasoning": run.reply.reasoning,
        "tool_calls": [{"name": name, "arguments": arguments} for name, arguments in run.reply.tool_calls],
    }


def _paired(first: Combination, other: Combination) -> dict[str, Any]:
    pairs = [
        (a.outcome is Outcome.PASSED, b.outcome is Outcome.PASSED)
        for mine, theirs in zip(first.groups, other.groups, strict=True)
        for a, b in zip(mine.runs, theirs.runs, strict=True)
    ]
    lost, gained = pairs.count((True, False)), pairs.count((False, True))
    names = {"reference": first.label, "candidate": other.label}
    return {**names, "runs": len(pairs), "lost": lost, "gained": gained, "p": mcnemar(lost, gained)}


def _verdict(item: Requirement, part: Mapping[str, Any]) -> dict[str, Any]:
    named = {each.get("name", each["category"]): each for each in (*part["categories"], *part["tasks"])}
    found = named.get(item.name, part["overall"])
    passed, total = found["passed"], found["total"]
    if item.name == CALL_FORM:
        passed, total = found["calls_formed"], found["calls_expected"]
    return {
        "name": item.name,
        "share": float(item.share),
        "combination": part["label"],
        "passed": passed,
        "total": total,
        "met": passed >= item.share * total,
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
