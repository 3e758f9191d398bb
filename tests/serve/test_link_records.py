"""What goes between the processes arrives as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer import errors
from ninfer.api.options import EngineOptions, GenerationOptions
from ninfer.engine import Done, Output, PromptProgress, RuntimeStatistics, Started, Statistics, ThinkingReport
from ninfer.errors import EngineError, NInferError
from ninfer.events import Channel, FinishReason, TokenLogprob
from ninfer.frontend import Prompt
from ninfer.serve.jobs import EngineInfo, Job
from ninfer.serve.records import (
    Cancel,
    Counters,
    EngineFailed,
    Events,
    Failed,
    Heartbeat,
    Hello,
    LoadFailed,
    Loading,
    Opened,
    Query,
    Ready,
    Setup,
    Shutdown,
    Submit,
    decode_command,
    decode_report,
    decode_setup,
    described,
    encode,
    restored,
)

INFO = EngineInfo("n", "a", "cpu", 1, 2, "bf16", 3, 4, 5, 0.5, "plan", formats=("f",), extra={"a": "b"})
TEXT = st.text(st.characters(codec="utf-8"))


@pytest.mark.parametrize(
    "report",
    [
        Hello(),
        Loading("s", 1, 2),
        Opened(Path("/a b/ü")),
        Ready(INFO),
        LoadFailed("ModelError", "no"),
        Failed(1, "OptionError", "no"),
        Counters(2, RuntimeStatistics(finished={FinishReason.CANCELLED: 3}, handover_seconds=0.5)),
        EngineFailed("no"),
        Heartbeat(),
    ],
)
def test_reports(report):
    assert decode_report(encode(report)) == report


@pytest.mark.parametrize("command", [Cancel(2**40), Query(1), Shutdown()])
def test_commands(command):
    assert decode_command(encode(command)) == command


def test_setup():
    options = EngineOptions(kv_capacity="auto", cache_dir=Path("/c"), chat_template="{{ ä }}", threads=3)
    setup = Setup("ipc:///x", b"\x00\xff", Path("/m"), options, False)
    assert decode_setup(encode(setup)) == setup


@given(
    st.lists(st.integers(0, 2**32 - 1)),
    st.tuples(TEXT, TEXT),
    st.integers(0, 2**64 - 1),
    st.none() | st.floats(0, 2),
)
def test_jobs(tokens, stops, seed, temperature):
    stop = tuple(stop for stop in stops if stop)
    options = GenerationOptions(
        seed=seed, temperature=temperature, stop=stop, grammar="start: 'a'", logprobs=0
    )
    prompt = Prompt(tokens, "a private text", True, True, (0, 2), 1, None)
    data = encode(Submit.of(5, Job(prompt, options)))
    assert b"private" not in data
    command = decode_command(data)
    assert isinstance(command, Submit)
    got = command.whole_prompt()
    assert (got.tokens, got.text) == (tokens, "")
    assert (got.starts_in_thinking, got.declares_tools, got.boundaries) == (True, True, (0, 2))
    assert (command.job, command.options) == (5, options)


@given(TEXT, st.floats(allow_nan=False), st.lists(st.integers(0, 2**31)))
def test_events(text, number, ids):
    statistics = Statistics(
        FinishReason.STOP_STRING, 1, 2, 3, 4, number, 0.0, tuple(ids), ThinkingReport(1, 2, 3, True)
    )
    events = [
        Started(1, 2),
        PromptProgress(1, 2, number),
        *(Output(channel, text) for channel in Channel),
        Output(Channel.CONTENT, text, (TokenLogprob(1, number, ((2, -0.5), (3, -1.0))),), 7, number),
        Done(statistics),
    ]
    report = decode_report(encode(Events.of(9, events)))
    assert isinstance(report, Events)
    assert report.job == 9
    assert report.unwrapped() == events


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, NInferError)]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_keep_class_and_sentence(kind):
    error = restored(*described(kind("a sentence; with a remedy")))
    assert type(error) is kind
    assert str(error) == "a sentence; with a remedy"


def test_text_that_no_encoding_holds_is_passed_on_all_the_same():
    name, sentence = described(errors.FrontendError("the stop \ud800 and the file \udcff"))
    failed = Failed(1, name, sentence)
    assert decode_report(encode(failed)) == failed
    assert sentence == "the stop \\ud800 and the file \\udcff"
    path = Path("/a") / os.fsdecode(b"\xff.gguf")
    assert decode_report(encode(Opened(path))) == Opened(path)


def test_of_a_defect_only_the_class_is_told():
    error = restored(*described(ValueError("what somebody wrote")))
    assert type(error) is EngineError
    assert "ValueError" in str(error)
    assert "somebody" not in str(error)
    for name in ("annotations", "NoSuchError", "__doc__", ""):
        assert type(restored(name, "x")) is EngineError


def test_the_server_needs_no_torch():
    code = "import ninfer.serve.run, sys; sys.exit(bool({'torch', 'numba'} & sys.modules.keys()))"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, env=os.environ, check=True, timeout=60)
