"""The examples of docs/python.md, run one after another."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
MODEL = "models/smollm2-135m-instruct.ninfer"


def test_the_page_runs_as_it_stands(tiny: Path, capsys):
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(MODEL) == 1
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    # The tiny model has fewer positions.
    code = code.replace(MODEL, str(tiny)).replace("max_context=1024", "max_context=512, threads=1")
    threads = torch.get_num_threads()
    try:
        exec(compile(code, str(PAGE), "exec"), {})
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert "prompt tokens are known already" in out
    assert "cancelled" in out
    assert "the context holds 512" in out
    assert "Health(available=True, error=None)" in out
    assert "Health(available=False, error='the engine is closed')" in out
