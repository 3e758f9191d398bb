"""`ninfer`: answers, options, and a clear sentence with exit code 1 for everything that can't be done."""

import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ninfer.cli import common
from ninfer.cli.main import main
from ninfer.frontend.options import EFFORTS


class Run:
    """One run in this process: exit code and both streams."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
        self.code = main([str(argument) for argument in arguments])
        self.out, self.err = capsys.readouterr()

    def refused(self, *words: str) -> None:
        """Exit code 1, nothing on stdout, one sentence that contains the words, no traceback."""
        assert self.code == 1
        assert self.out == ""
        [sentence] = [line for line in self.err.splitlines() if line.startswith("error: ")]
        for word in words:
            assert word in sentence
        assert "Traceback" not in self.err


@pytest.fixture
def ninfer(capsys: pytest.CaptureFixture[str]):
    return lambda *arguments: Run(capsys, *arguments)


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def ids(run: Run) -> list[int]:
    [line] = [line for line in run.err.splitlines() if line.startswith("tokens ")]
    return [int(word) for word in line.split()[3:]]


def test_an_answer_goes_to_stdout_and_its_report_to_stderr(ninfer, tiny):
    run = ninfer(tiny, "--prompt", "Hello", "--max-new", 12, "--no-thinking", "--print-token-ids")
    assert run.code == 0
    assert run.out.endswith("\n")
    rows = [line.split() for line in run.err.splitlines()]
    assert ["phase", "detail", "elapsed/progress"] in rows
    assert ["summary", "finish", "reason", "output-limit"] in rows
    assert len(ids(run)) == 12


def test_thinking_text_goes_to_stderr(ninfer, tiny):
    thinking = ninfer(tiny, "--prompt", "Hello", "--max-new", 12, "--greedy", "--log-level", "error")
    assert (thinking.code, thinking.out) == (0, "\n")
    assert thinking.err.strip()
    raw = ninfer(
        tiny, "--prompt", "Hello", "--max-new", 12, "--greedy", "--log-level", "error", "--raw-output"
    )
    assert raw.out.strip()
    assert raw.err == ""


def test_the_same_seed_gives_the_same_tokens(ninfer, tiny):
    def draw(*more):
        return ids(ninfer(tiny, "--prompt", "Hi", "--max-new", 16, "--print-token-ids", *more))

    assert draw() == draw("--seed", 0) != draw("--seed", 1)
    assert draw("--greedy") == draw("--greedy", "--seed", 1, "--temperature", 1.5) == draw("--temperature", 0)


def test_a_thinking_budget_is_kept(ninfer, tiny):
    run = ninfer(tiny, "--prompt", "Hi", "--max-new", 200, "--thinking-budget", 5, "--max-context", 512)
    assert run.code == 0
    assert "thinking budget applied   yes" in run.err
    assert "thinking model tokens     5" in run.err


@pytest.mark.parametrize("text", ["Grüße, 你好 👩‍👩‍👧", "a\u0301", "\u202eabc", "\x00", "<|im_end|>"])
def test_unicode_prompts(ninfer, tiny, text):
    assert ninfer(tiny, "--prompt", text, "--max-new", 2).code == 0


def test_the_prompt_may_come_from_stdin(ninfer, tiny, monkeypatch):
    given = ids(ninfer(tiny, "--prompt", "Hällo", "--max-new", 8, "--print-token-ids"))
    stdin(monkeypatch, "Hällo".encode())
    assert ids(ninfer(tiny, "--max-new", 8, "--print-token-ids")) == given


def test_threads(ninfer, tiny):
    before = torch.get_num_threads()
    try:
        assert "on cpu, 1 thread;" in ninfer(tiny, "--prompt", "Hi", "--max-new", 1, "--threads", 1).err
    finally:
        torch.set_num_threads(before)


def test_messages_file(ninfer, tiny, tmp_path):
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"role": "user", "content": "Hi"}]))
    expected = ids(ninfer(tiny, "--prompt", "Hi", "--max-new", 4, "--print-token-ids"))
    assert ids(ninfer(tiny, "--messages", file, "--max-new", 4, "--print-token-ids")) == expected
    file.write_text("[]")
    ninfer(tiny, "--messages", file).refused("messages")
    ninfer(tiny, "--messages", tmp_path / "none.json").refused("none.json", "No such file")
    ninfer(tiny, "--messages", file, "--prompt", "x").refused("exactly one of --prompt or --messages")


@pytest.mark.parametrize("data", [b"", b" \n\t"])
def test_empty_input_is_refused(ninfer, tiny, monkeypatch, data):
    stdin(monkeypatch, data)
    ninfer(tiny).refused("the prompt from stdin is empty")
    ninfer(tiny, "--prompt", data.decode()).refused("the prompt from --prompt is empty")


def test_input_that_is_not_utf8_is_refused(ninfer, tiny, monkeypatch):
    stdin(monkeypatch, b"ab\xff")
    ninfer(tiny).refused("not valid UTF-8", "byte 2")
    ninfer(tiny, "--prompt", "ab\udcff").refused("not valid UTF-8", "byte 2")


def test_drafts_change_no_answer_and_are_reported(ninfer):
    nano = Path(__file__).parents[2] / "models" / "ninfer-nano.ninfer"
    asked = [nano, "--prompt", "Write a short story about a fox.", "--max-new", 40, "--max-context", 256]
    asked += ["--greedy", "--presence-penalty", 0, "--no-thinking", "--print-token-ids", "--threads", 1]
    plain, fast = ninfer(*asked), ninfer(*asked, "--spec", "mtp", "--draft-tokens", 3)
    assert (fast.code, fast.out, ids(fast)) == (0, plain.out, ids(plain))
    assert "draft window" not in plain.err
    rows = [line for line in fast.err.splitlines() if line.startswith("summary ")]
    told = {row[12:38].strip(): row[38:] for row in rows}
    rounds, drafted, accepted = (int(told[name]) for name in ("rounds", "drafted", "accepted"))
    assert told["draft window"] == "3"
    assert rounds + int(told["fallback steps"]) + accepted == len(ids(fast)) - 1
    assert told["acceptance rate"] == f"{100 * accepted / drafted:.1f} %"
    assert told["acceptance length"] == f"{1 + accepted / rounds:.2f} tok/round"
    positions = [int(count) for count in told["accepted by position"].split()]
    lengths = [int(count) for count in told["rounds by accepted"].split()]
    assert (len(positions), sum(positions)) == (3, accepted)
    assert (len(lengths), sum(lengths)) == (4, rounds)


def test_a_prompt_may_fill_the_context_but_not_exceed_it(ninfer, tiny):
    run = ninfer(tiny, "--prompt", "Hello there", "--max-new", 50)
    [row] = [line for line in run.err.splitlines() if "prompt tokens" in line]
    tokens = int(row.split()[-1])
    full = ninfer(tiny, "--prompt", "Hello there", "--max-new", 50, "--max-context", tokens)
    assert full.code == 0
    assert "context-capacity" in full.err
    assert "generated tokens          1\n" in full.err
    over = ninfer(tiny, "--prompt", "Hello there", "--max-context", tokens - 1, "--log-level", "error")
    over.refused(str(tokens), str(tokens - 1), "--max-context")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--foo"], ["unknown argument: --foo"]),
        (["--max-new"], ["--max-new needs a value"]),
        (["--prompt", "x", "--max-new", "0"], ["--max-new must be at least 1, not 0"]),
        (["--max-new", "x"], ["--max-new", "'x' is not a whole number"]),
        (["--max-new", "-1"], ["--max-new", "'-1' is not a whole number"]),
        (["--seed", "1_0"], ["--seed", "'1_0' is not a whole number"]),
        (["--max-context", ""], ["--max-context", "'' is not a whole number"]),
        (["--stop-token-id", "1", "--stop-token-id", "+2"], ["--stop-token-id", "'+2'"]),
        (["--top-k", "9" * 5000], ["--top-k", "is not a whole number"]),
        (["--min-p", "half"], ["--min-p", "'half' is not a number"]),
        (["--prompt", "x", "--threads", "100000"], ["--threads must be", "between 1 and 1024"]),
        (["--prompt", "x", "--temperature", "nan"], ["temperature must be a number between 0 and 2"]),
        (["--prompt", "x", "--temperature", "3"], ["temperature must be a number between 0 and 2", "3.0"]),
        (["--prompt", "x", "--top-k", "21"], ["error: --top-k must be a whole number between 0 and 20"]),
        (["--prompt", "x", "--seed", str(2**64)], ["seed"]),
        (["--prompt", "x", "--stop", ""], ["stop string"]),
        (["--prompt", "x", "--kv-dtype", "int9"], ["invalid --kv-dtype: int9; use one of bf16"]),
        (["--prompt", "x", "--prefill-chunk", "100"], ["multiple of 128"]),
        (["--prompt", "x", "--kv-capacity", "many"], ["invalid --kv-capacity: many; give a number of"]),
        (["--prompt", "x", "--kv-capacity", "100"], ["at least --max-context: 100 is less than 512"]),
        (["--prompt", "x", "--kv-capacity", "999999999"], ["MiB are needed", "lower --kv-capacity"]),
        (["--prompt", "x", "--vram-headroom-mib", "9"], ["requires --kv-capacity auto"]),
        (["--prompt", "x", "--max-concurrency", "9"], ["error: --max-concurrency must be", "1 and 8"]),
        (["--prompt", "x", "--device-state-slots", "5000"], ["error: --device-state-slots must be"]),
        (["--prompt", "x", "--turn-anchors", "5000"], ["error: --turn-anchors must be"]),
        (["--prompt", "x", "--no-prefix-reuse", "--device-state-slots", "1"], ["drop one of them"]),
        (["--prompt", "x", "--max-context", "513"], ["513", "512"]),
        (["--prompt", "x", "--log-level", "loud"], ["log level"]),
        (["--prompt", "x", "--no-thinking", "--reasoning-effort", "high"], ["'high' needs thinking"]),
        (["--prompt", "x", "--no-thinking", "--thinking-budget", "3"], ["thinking budget"]),
        (["--prompt", "x", "--reasoning-effort", "huge"], ["huge"]),
        (["--prompt", "hi", "--lm-head-draft"], ["--lm-head-draft require --spec mtp"]),
        (["--prompt", "hi", "--spec", "mtp"], ["--spec mtp requires --draft-tokens in [1, 5]"]),
        (
            ["--prompt", "hi", "--spec", "mtp", "--draft-tokens", "0"],
            ["--spec mtp requires --draft-tokens in [1, 5]"],
        ),
        (["--prompt", "hi", "--spec", "none"], ["invalid speculative backend: none; use mtp"]),
        (["--prompt", "hi", "--spec", "mtp", "--draft-tokens", "3"], ["has no MTP layer", "--spec mtp"]),
        (
            ["--prompt", "hi", "--spec", "mtp", "--draft-tokens", "6"],
            ["--spec mtp requires --draft-tokens in [1, 5]"],
        ),
        (
            ["--prompt", "hi", "--draft-tokens", "3"],
            ["--draft-tokens and --lm-head-draft require --spec mtp"],
        ),
        (
            ["--prompt", "hi", "--spec", "dflash", "--draft-tokens", "3"],
            ["--spec dflash isn't supported by this version"],
        ),
        (["--prompt", "x", "--tp", "2"], ["--tp is not available", "several GPUs"]),
        (["--tp=2"], ["--tp is not available", "several GPUs"]),
        (["--vision"], ["--vision is not available"]),
    ],
)
def test_bad_options_are_refused(ninfer, tiny, arguments, words):
    ninfer(tiny, *arguments).refused(*words)


def test_an_option_of_later_work_may_be_another_options_value(ninfer, tiny):
    assert ninfer(tiny, "--prompt", "--tp", "--max-new", 1).code == 0


def test_help_lists_the_options(ninfer):
    for flag in ("--help", "-h"):
        run = ninfer(flag)
        assert (run.code, run.err) == (0, "")
        assert "--thinking-budget" in run.out
        assert "|".join(EFFORTS) in run.out


def test_no_model_is_refused_with_usage(ninfer):
    run = ninfer()
    assert run.code == 1
    assert "Usage: ninfer" in run.err


def test_files_that_are_no_artifact_are_refused(ninfer, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("NINFER_CACHE", str(tmp_path / "cache"))
    ninfer(tmp_path / "none.ninfer", "--prompt", "x").refused("none.ninfer", "does not exist")
    bad = tmp_path / "bad.ninfer"
    data = tiny.read_bytes()
    for content, word in [
        (b"", "bad.ninfer"),
        (b"NINFER", "bad.ninfer"),
        (b"PK\x03\x04" + data[4:], "is no .ninfer artifact"),
        (data[:7] + b"\x01" + data[8:], "version 1"),
        (data[:7] + b"\x02" + data[8:], "version 2"),
        (data[: len(data) // 2], "bytes"),
        (data[:-1], "bytes"),
        (data[:8] + struct.pack("<Q", 2**60) + data[16:], "bad.ninfer"),
    ]:
        bad.write_bytes(content)
        ninfer(bad, "--prompt", "x").refused(word)
    ninfer(tmp_path, "--prompt", "x").refused(str(tmp_path))


def test_an_unknown_template_and_a_broken_one_are_refused(ninfer, tiny, tmp_path):
    ninfer(tiny, "--prompt", "x", "--chat-template", tmp_path / "none.jinja").refused("none.jinja")
    template = tmp_path / "broken.jinja"
    template.write_text("{% for %}")
    ninfer(tiny, "--prompt", "x", "--chat-template", template).refused("template")
    template.write_text("{{ raise_exception('no such thing') }}")
    ninfer(tiny, "--prompt", "x", "--chat-template", template).refused("no such thing")
    template.write_text("{{ raise_exception('forged\nerror: line\x1b[2J') }}")
    ninfer(tiny, "--prompt", "x", "--chat-template", template).refused("forged error: line\\x1b[2J")


def test_a_missing_resource_is_named(ninfer, tiny, tmp_path):
    broken = tmp_path / "broken.ninfer"
    data = tiny.read_bytes()
    [size] = struct.unpack("<Q", data[8:16])
    directory = json.loads(data[32 : 32 + size])
    del directory["components"]["text"]["resources"]["chat_template.jinja"]
    text = json.dumps(directory, separators=(",", ":")).encode()
    broken.write_bytes(data[:32] + text.ljust(size) + data[32 + size :])
    ninfer(broken, "--prompt", "x").refused("chat_template.jinja")


def test_a_folder_is_converted_once_into_the_cache(ninfer, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("NINFER_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(tiny.parent / "checkpoint", tmp_path / "checkpoint")
    arguments = ("--prompt", "Hi", "--max-new", 6, "--print-token-ids")
    first = ids(ninfer(folder, *arguments))
    [artifact] = (tmp_path / "cache").glob("*/*.ninfer")
    made = artifact.stat().st_mtime_ns
    assert ids(ninfer(folder, *arguments)) == first == ids(ninfer(tiny, *arguments))
    assert artifact.stat().st_mtime_ns == made


def interrupted(model: Path, *options: str) -> tuple[int, str]:
    """Exit code and stderr of an answer that gets a Ctrl-C after its first byte."""
    command = [sys.executable, "-m", "ninfer.cli.main", str(model), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    return process.returncode, err.decode()


def test_ctrl_c_ends_the_answer_with_its_report(smollm2: Path):
    prompt = ["--prompt", "Tell me a very long story about a lighthouse.", "--max-new", "1500"]
    code, err = interrupted(smollm2, *prompt)
    assert code == 0
    assert "finish reason             cancelled" in err


def test_ctrl_c_at_the_very_end_is_clean(tiny: Path):
    """The whole answer takes 10 ms: the signal comes anywhere between its middle and the end of Python."""
    for seed in range(3, 7):
        code, err = interrupted(
            tiny, "--prompt", "Hi", "--raw-output", "--max-new", "60", "--seed", str(seed)
        )
        assert code == err.endswith("error: interrupted\n"), err
        assert "Traceback" not in err


def test_importing_the_package_is_light():
    code = "import sys, ninfer; assert not {'torch', 'numba', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def shell(command: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in which $NINFER is the program and $1, $2, ... the arguments."""
    environment = {**os.environ, "NINFER": f"{sys.executable} -m ninfer.cli.main", **environment}
    words = ["sh", "-c", command, "sh", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)


ANSWER = '$NINFER "$1" --prompt Hi --max-new 20 --raw-output --log-level off'


def test_a_closed_pipe_is_no_error_of_ours(tiny: Path):
    result = shell('$NINFER "$1" --prompt Hi --raw-output --max-new 300 | head -c 1', tiny)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        ('$NINFER "$1" <&-', 1, "", "error: the prompt from stdin is empty; give it some text\n"),
        (f"{ANSWER} >&-", 0, "", ""),
        (f"{ANSWER} --print-token-ids 2>&- | tr -d '\\n' | grep -c .", 0, "1\n", ""),
        (f"{ANSWER} >/dev/full", 1, "", "error: input or output failed: No space left on device\n"),
        ("$NINFER --help >/dev/full", 1, "", "error: input or output failed: No space left on device\n"),
    ],
)
def test_streams_that_are_closed_or_full(tiny, command, code, out, err):
    if "/dev/full" in command and not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    result = shell(command, tiny)
    assert (result.returncode, result.stdout, result.stderr) == (code, out, err)


def test_characters_that_stdout_cannot_hold_are_escaped(tiny: Path):
    wide = shell(ANSWER, tiny, PYTHONIOENCODING="utf-8")
    ascii = shell(ANSWER, tiny, PYTHONIOENCODING="ascii")
    assert not wide.stdout.isascii()
    assert ascii.stdout == wide.stdout.encode("ascii", "backslashreplace").decode()


def test_a_name_that_is_too_long_is_refused(ninfer):
    ninfer("a" * 300 + ".ninfer", "--prompt", "x").refused("File name too long")


def test_idle_threads_sleep_unless_the_user_chose(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    common._spin_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "10000"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    common._spin_briefly()
    assert "GOMP_SPINCOUNT" not in os.environ
