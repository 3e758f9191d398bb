"""Names of devices, and what is said where one is missing."""

import importlib.util

import pytest
import torch

from ninfer.api import Engine, EngineOptions, ScorerOptions
from ninfer.api.device import choose_device, describe_device
from ninfer.devices import check_device
from ninfer.errors import OptionError

HERE = torch.cuda.is_available()


class Gpu:
    """Says of `torch.cuda` what a machine with two GPUs would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Some GPU")


@pytest.mark.parametrize(
    ("name", "spelled"),
    [("cpu", "cpu"), ("cuda", "cuda"), ("cuda:1", "cuda:1"), ("0", "cuda:0"), ("auto", "auto")],
)
def test_names(name: str, spelled: str) -> None:
    assert check_device(name) == spelled
    assert EngineOptions(device=name).device == ScorerOptions(device=name).device == spelled


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "-1", "cuda:1000", None, 0])
def test_what_is_no_name(name: object) -> None:
    with pytest.raises(OptionError, match="device must be cpu, cuda, cuda:N or auto, not"):
        EngineOptions(device=name)  # type: ignore[arg-type]


def test_auto_takes_a_gpu_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert choose_device("cpu") == torch.device("cpu")
    assert describe_device(torch.device("cuda", 1)) == "Some GPU"
    assert describe_device(torch.device("cpu")) == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cuda:2", "the last GPU here is cuda:1"),
        ("cuda", "the package triton is missing; install it"),
    ],
)
def test_what_stands_in_the_way_is_said(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=words) as caught:
        choose_device(name)
    assert str(caught.value).startswith(f"device {name} is not available: ")
    assert choose_device("auto") == torch.device("cpu")


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, (7, 5))
    with pytest.raises(OptionError, match=r"Some GPU has compute capability 7\.5 and 8\.0 is needed"):
        choose_device("cuda:1")
    assert choose_device("auto") == torch.device("cpu")


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="finds no GPU; check the driver with nvidia-smi"):
        choose_device("cuda")


def test_a_build_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(OptionError, match="was built without CUDA; install a CUDA build"):
        choose_device("cuda")


@pytest.mark.skipif(HERE, reason="there is a GPU")
def test_an_engine_without_its_gpu_says_so(tiny) -> None:
    with pytest.raises(OptionError, match="device cuda is not available"):
        Engine.load(tiny, EngineOptions(device="cuda"))
