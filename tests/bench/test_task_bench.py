"""The task benchmark from its command line to its report, on a model whose answers are written by hand."""

import itertools
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binomtest

from bench.tasks import report, suite, table
from bench.tasks.__main__ import main
from bench.tasks.run import GroupRuns, Outcome, Run, Subject, engine_options, judge, read_reply, subject
from bench.tasks.task import Reply, Split, Task, rng_for
from ninfer.api import Channel, EngineDescription, FinishReason, Output
from ninfer.convert import convert
from ninfer.errors import CapacityError, OptionError
from ninfer.frontend import Frontend
from tests.frontend.conftest import QWEN, Documents, _qwen_documents
from tests.models.tiny import Qwen35Geometry, build, save_folder

CONTENT, THOUGHT = "The lazy dog", "Hm"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{{ '<|im_start|>assistant' + ('\\n<think>\\n' if enable_thinking else ':') }}"
)


def scripted(documents: Documents, folder: Path) -> Path:
    """An artifact that always answers CONTENT, after THOUGHT where the prompt opens a thinking block: layers
    add nothing, and the head knows for each token of the script the one that follows it."""
    documents.template = TEMPLATE
    geometry = Qwen35Geometry(vocab_size=1024)
    frontend = Frontend.from_resources(
        documents.resources(), architecture=QWEN, vocab_rows=geometry.vocab_size
    )
    end = frontend.stop_token_ids[0]
    [newline], [colon] = frontend.encode("\n"), frontend.encode(":")
    close = next(
        entry["id"] for entry in documents.tokenizer["added_tokens"] if entry["content"] == "</think>"
    )
    content = frontend.encode(CONTENT)
    chains = [colon, *content, end], [newline, *frontend.encode(THOUGHT), close, content[0]]
    model: Any = build(geometry)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("down_proj.weight", "o_proj.weight", "out_proj.weight", "model.norm.weight")):
                parameter.zero_()
        head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
        head.zero_()
        for before, after in (pair for chain in chains for pair in itertools.pairwise(chain)):
            head[after] += embedding[before]
    source = save_folder(model, folder / "checkpoint")
    for role, data in documents.resources().items():
        (source / role).write_bytes(data)
    convert(source, folder / "scripted.ninfer", recipe="bf16", name="scripted")
    return folder / "scripted.ninfer"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    yield scripted(_qwen_documents(), tmp_path_factory.mktemp("scripted"))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def qwen() -> Frontend:
    """A small tokenizer with the family's template."""
    return Frontend.from_resources(_qwen_documents().resources(), architecture=QWEN, vocab_rows=1000)


def toy(name: str, category: str, check: Any, **more: Any) -> suite.Entry:
    """Instances whose prompts differ by a random number."""

    def generator(rng: random.Random, split: Split) -> Task:
        prompt = f"{split} {rng.randrange(10**6)} " + "x " * (int(name[2:]) if name[2:].isdigit() else 0)
        messages = [{"role": "user", "content": prompt}]
        return Task(name, category, messages, {"content": CONTENT}, check, **{"max_new": 16, **more})

    return suite.entries({name: generator}, {})[0]


TOYS = [
    toy("right", "story", lambda reply: reply == Reply(CONTENT)),
    toy("wrong", "structured", lambda reply: False),
    toy("thinks", "reasoning", lambda reply: reply == Reply(CONTENT, THOUGHT), thinking=True),
    toy("short", "story", lambda reply: True, max_new=2),
    toy("kv16", "retrieval", lambda reply: True),
    toy("kv32", "retrieval", lambda reply: False),
    *suite.entries({"same": lambda rng, split: toy("kv90", "story", lambda reply: True).draw(0)}, {}),
    *suite.entries({}, {"once": lambda: TOYS[1].draw(0)}),
]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], artifact: Path):
    """Run the program on the scripted model."""
    monkeypatch.setattr(suite, "available", lambda: TOYS)

    def run(*arguments: object, models: tuple[object, ...] = (artifact,)) -> tuple[int, str, str]:
        code = main([*map(str, models), "--threads", "1", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_every_answer_is_run_checked_and_reported(bench, artifact: Path, tmp_path: Path):
    out = tmp_path / "made" / "out"
    arguments = ("--kv-dtype", "bf16,int8", "--per-task", 3, "--concurrency", 2, "--output", out)
    code, shown, told = bench(*arguments, "--require", "thinks>=1", "--require", "retrieval>=50%")
    assert code == 0
    document = json.loads((out / "report.json").read_text())
    assert document["schema_version"] == 1
    assert document["command"].startswith(f"python -m bench.tasks {artifact}")
    assert document["options"]["per_task"] == 3
    assert [part["label"] for part in document["combinations"]] == ["scripted/bf16", "scripted/int8"]
    for part in document["combinations"]:
        assert part["artifact"]["formats"] == ["bf16"]
        assert part["artifact"]["prefill_signature"].startswith("Qwen3_5ForCausalLM-5x96-")
        assert part["engine"]["concurrency"] == 2
        tasks = {task["name"]: task for task in part["tasks"]}
        # By category in the contract's order; what exists once is run once.
        assert list(tasks) == ["wrong", "once", "kv16", "kv32", "right", "short", "same", "thinks"]
        passed = {name: f"{task['passed']}/{task['total']}" for name, task in tasks.items()}
        assert passed == {
            "wrong": "0/3", "once": "0/1", "kv16": "3/3", "kv32": "0/3", "right": "3/3", "short": "0/3",
            "same": "3/3", "thinks": "3/3",
        }  # fmt: skip
        assert tasks["short"]["outcomes"] == {"passed": 0, "wrong": 0, "cut": 3, "unanswered": 0}
        assert {run["finish_reason"] for run in tasks["short"]["runs"]} == {"output-limit"}
        run = tasks["thinks"]["runs"][2]
        assert (run["index"], run["outcome"], run["finish_reason"]) == (2, "passed", "stop-token")
        assert (run["content"], run["reasoning"], run["tool_calls"]) == (CONTENT, THOUGHT, [])
        assert run["completion_tokens"] == run["rounds"] + 1
        assert run["decode_tok_s"] == pytest.approx(run["rounds"] / run["decode_seconds"])
        assert run["reused_tokens"] == 0
        assert (part["overall"]["tokens_per_round"], part["overall"]["acceptance"]) == (1.0, None)
        assert part["overall"]["total"] == 22
        assert [item["passed"] for item in part["categories"]] == [0, 3, 6, 3]
    [pair] = document["paired"]
    assert (pair["lost"], pair["gained"], pair["p"]) == (0, 0, 1.0)
    assert [(item["name"], item["met"]) for item in document["requirements"]] == [
        ("thinks", True), ("thinks", True), ("retrieval", True), ("retrieval", True),
    ]  # fmt: skip
    assert shown.startswith(table.text(document))
    assert (out / "report.md").read_text() == table.markdown(document)
    plot = (out / "plot.svg").read_text()
    assert plot.lstrip().startswith("<?xml")
    assert "</svg>" in plot
    assert told.count("\n") == 16
    assert "scripted/int8 short: 0/3 in " in told


def test_prompts_reuse_each_other_only_where_that_is_asked_for(bench, tmp_path: Path):
    reused = {}
    for name, more in (("off", ()), ("on", ("--reuse",))):
        common = ("--tasks", "same", "--per-task", 2, "--concurrency", 1, "--output", tmp_path / name)
        assert bench(*common, *more)[0] == 0
        document = json.loads((tmp_path / name / "report.json").read_text())
        assert document["options"]["prefix_reuse"] == (name == "on")
        reused[name] = [run["reused_tokens"] for run in document["combinations"][0]["tasks"][0]["runs"]]
    assert reused["off"] == [0, 0]
    assert reused["on"][1] > 64


def test_a_requirement_that_is_not_met_is_named(bench):
    code, shown, told = bench(
        "--tasks", "structured,right", "--require", "wrong>=0.5", "--require", "story>=1"
    )
    assert code == 1
    assert "wrong >= 50.00%: NOT met by scripted/bf16 (0/20)" in shown
    assert "story >= 100.00%: met by scripted/bf16 (20/20)" in shown
    assert "wrong must reach 50.00% but scripted/bf16 passes 0 of 20" in told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--tasks", "right,poem"),
            "there is no task or category poem; tasks: right, wrong, thinks, short, kv16",
        ),
        (("--tasks", "poem"), "categories: structured, retrieval, story, reasoning"),
        (("--per-task", 0), "--per-task must be at least 1, not 0"),
        (("--kv-dtype", "fp7"), "invalid KV format: 'fp7'; use bf16, int8"),
        (("--kv-dtype", "bf16,bf16"), "the KV format bf16 is named twice"),
        (("--concurrency", 9), "--concurrency must be a whole number between 1 and 8, not 9"),
        (("--require", "right"), "--require 'right' must be NAME>=SHARE with a share from 0 to 1"),
        (("--require", "right>=2"), "--require 'right>=2' must be NAME>=SHARE with a share from 0 to 1"),
        (
            ("--tasks", "right", "--require", "kv16>=1"),
            "--require kv16: it isn't run; what is run: right, story",
        ),
        (("--model", "twice"), "--model 'twice' must be NAME=PATH"),
        (("--model", "scripted=x"), "two models are called scripted"),
        (("--model", "other=/no/such"), "/no/such"),
        (("--max-context", 60), "but --max-context allows 60; leave those tasks out with --tasks"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_sentence(bench, arguments: tuple, sentence: str):
    code, shown, told = bench(*arguments)
    assert (code, shown) == (1, "")
    assert told.startswith("python -m bench.tasks: ")
    assert told.count("\n") == 1
    assert sentence in told


def test_models_are_needed_and_may_have_names(bench, artifact: Path):
    assert "name at least one model" in bench(models=())[2]
    code, shown, _ = bench(
        "--tasks", "once", "--model", f"a={artifact}", "--model", f"b={artifact}", models=()
    )
    assert code == 0
    assert shown.splitlines()[1].split()[:2] == ["a/bf16", "b/bf16"]


def test_an_output_folder_with_files_is_refused_before_anything_runs(bench, tmp_path: Path):
    (tmp_path / "old").write_text("")
    code, _, told = bench("--output", tmp_path)
    assert code == 1
    assert "is not empty" in told


def test_without_matplotlib_the_figures_are_written_all_the_same(
    bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, told = bench("--tasks", "once", "--output", tmp_path)
    assert code == 0
    assert "the plot needs matplotlib, which is not installed; pip install 'ninfer[train]'" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]


def test_instances_are_the_held_out_draws():
    [group] = suite.choose(TOYS, ["right"], 4)
    numbers = [int(task.messages[0]["content"].split()[1]) for task in group.tasks]
    assert numbers == [rng_for("right", "heldout", i).randrange(10**6) for i in range(4)]
    assert all(task.messages[0]["content"].startswith("heldout ") for task in group.tasks)


def test_a_perfect_answer_passes_on_the_way_that_a_models_answer_takes(qwen: Frontend):
    """Every task of the repository: its answer, written by the chat template, comes back from the session."""
    groups = suite.choose(suite.available(), [], 2)
    assert "jsonl32_canonical" in [group.name for group in groups]
    for task in (task for group in groups for task in group.tasks):
        prompt = qwen.render(task.messages, tools=task.tools or None, thinking=task.thinking)
        answered = [*task.messages, {"role": "assistant", "content": "", **task.answer}]
        whole = qwen.render(answered, tools=task.tools or None, add_generation_prompt=False)
        assert whole.tokens[: len(prompt.tokens)] == prompt.tokens
        session = qwen.session(prompt)
        deltas = []
        for token in whole.tokens[len(prompt.tokens) :]:
            step = session.push(token)
            deltas += step.deltas
            if step.finish is not None:
                break
        parts = [Output(delta.channel, delta.text) for delta in (*deltas, *session.close().deltas)]
        reply, failure, mismatches = read_reply(parts, task)
        assert (failure, mismatches) == (None, 0)
        assert session.finish is not None
        assert judge(task, reply, session.finish) is Outcome.PASSED


def test_the_engine_holds_as_many_of_the_longest_as_run_together(artifact: Path):
    groups = suite.choose(TOYS, ["right", "kv32"], 3)
    model = subject("m", artifact, groups)
    needs = [
        len(prompt.tokens) + task.max_new
        for group, prompts in zip(groups, model.prompts, strict=True)
        for task, prompt in zip(group.tasks, prompts, strict=True)
    ]
    pages = sorted((-(-need // 64) for need in needs), reverse=True)
    assert pages[0] > pages[-1]
    options = engine_options(model, groups, kv_dtype="bf16", concurrency=4)
    assert (options.max_context, options.kv_capacity) == (64 * pages[0], 64 * sum(pages[:4]))
    positions = max(needs) - 1
    with pytest.raises(
        CapacityError, match=rf"^kv32 needs {positions + 1} tokens, but m knows {positions}; "
    ):
        engine_options(replace(model, positions=positions), groups, kv_dtype="bf16", concurrency=4)


def test_a_cut_or_empty_answer_is_never_right():
    [task] = suite.choose(TOYS, ["short"], 1)[0].tasks
    assert judge(task, Reply("x"), FinishReason.STOP_TOKEN) is Outcome.PASSED
    assert judge(task, Reply("x"), FinishReason.OUTPUT_LIMIT) is Outcome.CUT
    assert judge(task, Reply("x"), FinishReason.CONTEXT_CAPACITY) is Outcome.CUT
    assert judge(task, Reply(" \n", "thought"), FinishReason.STOP_TOKEN) is Outcome.UNANSWERED
    assert judge(task, Reply("", "", (("f", {}),)), FinishReason.STOP_TOKEN) is Outcome.PASSED


def test_a_reply_is_read_from_the_channels_of_a_session(qwen: Frontend):
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    task = Task("t", "tools", [{"role": "user", "content": "7"}], {}, bool, True, tools)
    session = qwen.session(qwen.render(task.messages, tools=tools, thinking=True))
    call = "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>"
    deltas = [
        delta
        for token in qwen.encode(f"Hm,\nso.\n</think>\n\nSo:\n\n{call}")
        for delta in session.push(token).deltas
    ]
    parts = [Output(delta.channel, delta.text) for delta in (*deltas, *session.close().deltas)]
    assert {part.channel for part in parts} == set(Channel)
    assert read_reply(parts, task) == (Reply("So:", "Hm,\nso.", (("add", {"a": 7}),)), None, 0)
    reply, failure, _ = read_reply([*parts, Output(Channel.CONTENT, " done")], task)
    assert (reply.content, reply.tool_calls, failure) == (f"So:\n\n{call} done", (), "trailing_content")


@pytest.mark.parametrize(("passed", "total"), [(0, 1), (1, 1), (0, 20), (19, 20), (20, 20), (317, 1000)])
def test_wilson_is_what_scipy_gives(passed: int, total: int):
    interval = binomtest(passed, total).proportion_ci(0.95, method="wilson")
    assert report.wilson(passed, total) == pytest.approx((interval.low, interval.high), abs=1e-12)


def test_wilson_of_nothing_says_nothing():
    assert report.wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (3, 3), (2, 11), (40, 17)])
def test_mcnemar_is_the_exact_binomial_test(lost: int, gained: int):
    expected = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    assert report.mcnemar(lost, gained) == pytest.approx(expected)


def test_a_requirement_is_exact():
    assert report.requirement(" a-b >= 95 % ") == report.requirement("a-b>=0.95")
    assert report.requirement("a>=0.95").share * 20 == 19


def made(outcomes: str, tokens: int, rounds: int, rate: float) -> tuple[Run, ...]:
    """Runs by their outcomes' first letters."""
    kinds = {kind[0]: kind for kind in Outcome}
    return tuple(
        Run(index, kinds[letter], "stop-token", 5, 0, tokens, 0, 0.1, 0.2, 0.4, 50.0, rate, rounds,
            Reply("x"), False, None, 0)
        for index, letter in enumerate(outcomes)
    )  # fmt: skip


def combination(
    label: str, kv: str, drafted: int, first: str, second: str, rate: float
) -> report.Combination:
    model = Subject(label, Path("m.ninfer"), "m", "A", "A-1x2-0", ("BF16",), 10, 99, ())
    engine = EngineDescription("m", "A", "cpu", 1, 64, kv, 64, 1, 10, 0.5, "")
    rounds = 5 if drafted else 10
    groups = (
        GroupRuns("jsonl", "structured", made(first, 11, rounds, rate), 2.0, drafted, drafted * 3 // 4),
        GroupRuns("csv", "structured", made(second, 11, rounds, rate), 2.0, 0, 0),
        GroupRuns("poem", "story", made(second, 11, rounds, rate), 1.0, 0, 0),
    )
    return report.Combination(model, engine, 2, groups)


def document(*combinations: report.Combination) -> dict[str, Any]:
    groups = [suite.Group(group.name, group.category, (None,) * 2) for group in combinations[0].groups]  # type: ignore[arg-type]
    facts = {"created": "2026-11-30", "command": "c", "options": {"per_task": 2}}
    return report.document(combinations, groups, [report.requirement("csv>=0.5")], **facts)


def test_the_table_of_one_combination():
    shown = table.text(document(combination("m", "bf16", 0, "pw", "cu", 100.0)))
    assert shown.splitlines() == [
        "task                            passed  tokens/round  acceptance %  decode tok/s",
        "                                m/bf16",
        "structured  1/4 25.0 %, 1 cut, 1 empty          1.00             –         100.0",
        "  jsonl                            1/2          1.00             –         100.0",
        "  csv              0/2, 1 cut, 1 empty          1.00             –         100.0",
        "story        0/2 0.0 %, 1 cut, 1 empty          1.00             –         100.0",
        "  poem             0/2, 1 cut, 1 empty          1.00             –         100.0",
        "all         1/6 16.7 %, 2 cut, 2 empty          1.00             –         100.0",
        "",
        "csv >= 50.00%: NOT met by m/bf16 (0/2)",
    ]


def test_figures_that_differ_have_a_column_each_and_drafts_are_counted():
    both = document(
        combination("m", "bf16", 0, "pp", "pp", 100.0), combination("m", "int8", 40, "pw", "pp", 150.0)
    )
    shown = table.text(both).splitlines()
    titles, labels, _, jsonl, csv, *_ = (re.split(" {2,}", line.strip()) for line in shown)
    figures = ["tokens/round"] * 2 + ["acceptance %"] * 2 + ["decode tok/s"] * 2
    assert titles == ["task", "passed", "passed", *figures]
    assert labels == ["m/bf16", "m/int8"] * 4
    assert jsonl == ["jsonl", "2/2", "1/2", "1.00", "2.00", "–", "75.0", "100.0", "150.0"]
    assert csv == ["csv", "2/2", "2/2", "1.00", "2.00", "–", "–", "100.0", "150.0"]
    assert "m/int8 against m/bf16: 1 lost, 0 gained of 6 (exact McNemar p = 1.000)" in shown
    overall = both["combinations"][1]["overall"]
    assert (overall["output_tok_s"], overall["acceptance"]) == (66 / 5, 0.75)


def test_the_form_of_calls_is_counted_where_calls_are_the_answer():
    right, wrong, none, other = made("pwwp", 11, 10, 100.0)
    called = Reply("", "", (("f", {}),))
    runs = (
        replace(right, calls_expected=True, reply=called),
        replace(wrong, calls_expected=True, reply=called),
        replace(none, calls_expected=True, call_failure="malformed_structure"),
        replace(other, reply=called),
    )
    one = replace(
        combination("m", "bf16", 0, "", "", 1.0), groups=(GroupRuns("t", "tools", runs, 1.0, 0, 0),)
    )
    made_report = report.document([one], [], [report.requirement("call_form>=0.6")], options={})
    assert "m/bf16: 2 of 3 answers that should call tools have well-formed calls" in table.text(made_report)
    assert report.unmet(made_report) == []
    made_report = report.document([one], [], [report.requirement("call_form>=0.98")], options={})
    assert report.unmet(made_report) == ["call_form must reach 98.00% but m/bf16 passes 2 of 3"]
    groups = suite.choose(suite.available(), ["tools", "add2"], 1)
    report.check_requirements([report.requirement("call_form>=0.98")], groups)
    groups = suite.choose(suite.available(), ["add2"], 1)
    with pytest.raises(OptionError, match="--require call_form: it isn't run; what is run: add2, reasoning"):
        report.check_requirements([report.requirement("call_form>=0.98")], groups)


def test_markdown_has_intervals_of_categories():
    lines = table.markdown(document(combination("m|x", "bf16", 0, "pp", "pw", 100.0))).splitlines()
    assert "| task | passed m\\|x/bf16 | tokens/round | acceptance % | decode tok/s |" in lines
    low, high = report.wilson(3, 4)
    share = f"3/4 75.0 % [{100 * low:.1f}, {100 * high:.1f}]"
    assert f"| **structured** | **{share}** | **1.00** | **–** | **100.0** |" in lines
    assert "| jsonl | 2/2 | 1.00 | – | 100.0 |" in lines
