"""The MTP layer's chains, all at once, against the recursion of one round after another in float64."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ninfer.artifact import Artifact
from ninfer.errors import ConversionError, NInferError
from tools.nano import checkpoint, delta, export, geometry, rebuild, recursion
from tools.nano.batches import IGNORED, Batch, Sampler
from tools.nano.documents import Encoder
from tools.nano.model import MTP, Model, Parameters, initialize, unbind
from tools.nano.packing import packing

ROWS, STEPS = 2, 4
ENDS = np.array([0, 64, 192, 256, 384], dtype=np.int32)  # two documents a row
NANO = Path(__file__).parents[2] / "models" / "ninfer-nano.ninfer"


def _parameters(seed: int) -> Parameters:
    """Like a trained model's: no projection is zero, no norm is trivial."""
    parameters = initialize(seed, "cpu")
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for value in parameters.values():
            if value.std() < 1e-6:
                value.add_(torch.randn(value.shape, generator=generator) * 0.04)
    return parameters


def _tokens(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(geometry.BPE_TOKENS, (int(ENDS[-1]),), generator=generator)


def _model() -> Model:
    return Model(
        partial(delta.plain, rows=ROWS),
        lambda q, k, v, where: recursion.attend(q, [k], [v], where, ROWS),
        device="cpu",
        compiled=False,
    )


class Layer:
    """The MTP layer on one row at a time, float64."""

    def __init__(self, parameters: Parameters) -> None:
        self.p = {name: value.detach().double() for name, value in parameters.items()}

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + geometry.EPS).sqrt() * (1 + weight)

    def turn(self, x: torch.Tensor, position: int) -> torch.Tensor:
        width = int(geometry.HEAD_DIM * geometry.ROTARY_FACTOR)
        exponents = -torch.arange(0, width, 2, dtype=torch.float64) / width
        angle = position * geometry.THETA**exponents
        a, b, rest = x[..., : width // 2], x[..., width // 2 : width], x[..., width:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)

    def project(self, token: torch.Tensor, hidden: torch.Tensor, position: int) -> tuple[torch.Tensor, ...]:
        """x `[512]`, query `[2, 256]`, gate `[512]`, key and value `[256]`."""
        p = self.p
        pair = (
            self.norm(p["embedding"][token], p["norm.mtp"][0]),
            self.norm(hidden, p["norm.mtp"][1]),
        )
        x = p["mtp.fc"][0] @ pair[0] + p["mtp.fc"][1] @ pair[1]
        h = self.norm(x, p["norm.input"][MTP])
        q = (p["attention.q"][-1] @ h).reshape(geometry.HEADS, geometry.HEAD_DIM)
        q = self.turn(self.norm(q, p["attention.q_norm"][-1]), position)
        k = self.turn(self.norm(p["attention.k"][-1] @ h, p["attention.k_norm"][-1]), position)
        return x, q, p["attention.gate"][-1] @ h, k, p["attention.v"][-1] @ h

    def finish(
        self, x: torch.Tensor, q: torch.Tensor, gate: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        p = self.p
        weights = (q @ keys.T * geometry.HEAD_DIM**-0.5).softmax(-1)
        x = x + p["attention.out"][-1] @ ((weights @ values).flatten() * gate.sigmoid())
        h = self.norm(x, p["norm.post"][MTP])
        inner = torch.nn.functional.silu(p["mlp.gate"][-1] @ h) * (p["mlp.up"][-1] @ h)
        return self.norm(x + p["mlp.down"][-1] @ inner, p["norm.final"][1])

    def round(self, tokens: torch.Tensor, hidden: torch.Tensor, start: int, steps: int) -> list[torch.Tensor]:
        """Drafts of a round whose last text state is that of `start`; all before are committed."""
        past = [self.project(tokens[i + 1], hidden[i], i) for i in range(start + 1)]
        x, q, gate = past[-1][:3]
        keys, values = [row[3] for row in past], [row[4] for row in past]
        found = [self.finish(x, q, gate, torch.stack(keys), torch.stack(values))]
        for step in range(2, steps + 1):
            x, q, gate, k, v = self.project(tokens[start + step], found[-1], start + step - 1)
            keys.append(k)
            values.append(v)
            found.append(self.finish(x, q, gate, torch.stack(keys), torch.stack(values)))
        return found


def test_chains_of_all_positions_at_once_are_those_of_round_after_round() -> None:
    parameters, tokens = _parameters(3), _tokens(4)
    hidden = torch.randn(len(tokens), geometry.HIDDEN, generator=torch.Generator().manual_seed(5)) * 3
    where, rows = packing(ENDS, "cpu"), unbind(parameters, torch.float32)
    attend = partial(recursion.attend, rows=ROWS)
    with torch.no_grad():
        found = list(_model().chains(rows, hidden, tokens, where, STEPS, attend))
    layer = Layer(parameters)
    for begin, end in pairwise(ENDS.tolist()):
        for start in (0, 1, 17, end - begin - STEPS - 1):
            part = slice(begin, end)
            expected = layer.round(tokens[part], hidden[part].double(), start, STEPS)
            for ours, theirs in zip(found, expected, strict=True):
                row = ours[begin + start].double()
                assert (row - theirs).abs().max() < 2e-5 * theirs.abs().max()
    plain = _model().draft(rows, hidden, tokens.roll(-1), where)
    torch.testing.assert_close(found[0], plain, rtol=1e-5, atol=1e-5)


def test_rows_side_by_side_are_rows_one_after_another() -> None:
    parameters, tokens = _parameters(6), _tokens(7)
    where, rows = packing(ENDS, "cpu"), unbind(parameters, torch.float32)
    with torch.no_grad():
        both = _model().hidden(rows, tokens, where)
        for begin, end in ((0, 192), (192, 384)):
            alone = Model(
                delta.plain,
                lambda q, k, v, where: recursion.attend(q, [k], [v], where, 1),
                device="cpu",
                compiled=False,
            )
            ends = ENDS[(begin <= ENDS) & (end >= ENDS)] - begin
            found = alone.hidden(rows, tokens[begin:end], packing(ends, "cpu"))
            torch.testing.assert_close(both[begin:end], found, rtol=1e-4, atol=1e-4)


def _batch(seed: int) -> Batch:
    sources = np.full(int(ENDS[-1]), IGNORED, dtype=np.uint8)
    for begin, end in pairwise(ENDS.tolist()):
        sources[begin + 9 : end - 5] = 2
    return Batch(_tokens(seed).numpy().astype(np.uint16), sources, ENDS)


class Said:
    """Stands for the model: its best tokens and those of the layer's steps are given."""

    def __init__(self, embedding: torch.Tensor, best: torch.Tensor, guesses: list[torch.Tensor]) -> None:
        self.best, self.guesses = 100 * embedding[best], [100 * embedding[guess] for guess in guesses]

    def hidden(self, *_: object) -> torch.Tensor:
        return self.best

    def chains(self, *_: object) -> list[torch.Tensor]:
        return self.guesses


def test_a_guess_is_reached_where_those_before_it_are_right_and_the_text_is_the_models_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters, batch, generator = _parameters(8), _batch(9), torch.Generator().manual_seed(10)
    drafter = recursion.Drafter(parameters, rows=ROWS, device="cpu")
    tokens = torch.from_numpy(batch.tokens.astype(np.int64))

    def mostly(right: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.rand(right.shape, generator=generator) < 0.8, right, 7)

    best = mostly(tokens.roll(-1))
    guesses = [mostly(best.roll(-n)) for n in (1, 2, 3)]
    said = Said(parameters["embedding"].detach(), best, guesses)
    monkeypatch.setattr(drafter, "_model", said)
    learned, reached_last = batch.sources != IGNORED, 0
    for n, step in enumerate(drafter.guesses(batch, 3), 1):
        places = step.places.tolist()
        assert places == [t for t in range(len(tokens) - n) if learned[t : t + n + 1].all()]
        for index, t in enumerate(places):
            assert bool(step.right[index]) == bool(guesses[n - 1][t] == best[t + n])
            stood = [bool(guesses[j - 1][t] == best[t + j] == tokens[t + j + 1]) for j in range(1, n)]
            assert bool(step.reached[index]) == all(stood)
            assert (float(step.loss[index]) < 0.1) == bool(step.right[index])
        reached_last = int(step.reached.sum())
    assert 0.2 * len(tokens) < reached_last < 0.8 * len(tokens)


def test_training_moves_the_layer_alone() -> None:
    parameters = _parameters(10)
    kept = {name: value.detach().clone() for name, value in parameters.items()}
    drafter = recursion.Drafter(parameters, rows=ROWS, device="cpu")
    before = drafter.tensors()
    trainer = recursion.Trainer(drafter, 2, "cpu")
    for _ in range(2):
        trainer.step(_batch(11), 0.3)
    mean = float(trainer.sums[0, 0]) / 2
    trainer.sums.zero_()
    trainer.step(_batch(11), 0.3)
    assert float(trainer.sums[0, 0]) < mean
    after = drafter.tensors()
    assert after.keys() == before.keys() == {n for n in checkpoint.tensor_shapes() if n.startswith("mtp.")}
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(parameters[name], value) for name, value in kept.items())


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a layer drawn at random, as the training leaves them."""
    path = tmp_path_factory.mktemp("recursion") / recursion.WEIGHTS_FILE
    save_file(recursion.Drafter(_parameters(12), rows=1, device="cpu").tensors(), path)
    return path


def test_an_artifact_gets_the_new_layer_and_keeps_everything_else(weights: Path, tmp_path: Path) -> None:
    out = tmp_path / "new.ninfer"
    assert export.main(["mtp", str(NANO), str(out), "--weights", str(weights)]) == 0
    found, shipped = checkpoint.load(weights), Path(NANO)
    with Artifact.open(shipped) as old, Artifact.open(out) as new:
        assert new.directory == old.directory
        changed = {name for name in old.objects if _bytes(old, name) != _bytes(new, name)}
        bound = {name: {part.object for part in binding.parts} for name, binding in old.bindings.items()}
        mtp = set().union(*(objects for name, objects in bound.items() if name.startswith("mtp/")))
        others = set().union(*(objects for name, objects in bound.items() if not name.startswith("mtp/")))
        assert changed == mtp
        assert not mtp & others
        for name, value in rebuild.values(new).items():
            if name in found:
                error = (value - found[name].float()).abs().max()
                assert error <= found[name].float().abs().max() / 127, name


def _bytes(artifact: Artifact, name: str) -> bytes:
    record = artifact.objects[name]
    return artifact.read_range(record.offset, record.bytes)


def test_other_tensors_than_the_layers_are_refused(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for change in ({"model.norm.weight": torch.zeros(geometry.HIDDEN, dtype=torch.bfloat16)}, None):
        tensors = checkpoint.load(weights) | (change or {})
        if change is None:
            del tensors["mtp.fc.weight"]
        save_file(tensors, tmp_path / "odd.safetensors")
        with pytest.raises(ConversionError, match=r"tensors alone; see '(model\.norm|mtp\.fc)\.weight'"):
            export.write_mtp(tmp_path / "odd.safetensors", NANO, tmp_path / "new.ninfer")
        assert not (tmp_path / "new.ninfer").exists()
    with pytest.raises(SystemExit):
        export.main(["mtp", str(NANO), str(tmp_path / "new.ninfer")])
    assert "needs --weights FILE" in capsys.readouterr().err


def test_rows_end_where_documents_do() -> None:
    encoder, texts = Encoder(), {"prose": ["A text of some length. " * 400]}
    sampler = Sampler(texts, encoder, "seed", "train", {"prose": 1.0, "csv": 1.0, "kv512": 1.0}, 1024)
    batch = sampler.rows(3072, 3)
    assert len(batch.tokens) == len(batch.sources) == batch.ends[-1] == 3072
    assert {0, 1024, 2048, 3072} <= set(batch.ends.tolist())
    assert (np.diff(batch.ends) > 0).all()
    short = Sampler(texts, encoder, "seed", "train", {"kv2048": 1.0}, 512)
    with pytest.raises(NInferError, match="no instance of kv2048 has at most 512 tokens"):
        short.rows(1024, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "7"], "--tokens must be a multiple of 64 times --rows, not 32768"),
        (["--measure", "csv,poems"], "--measure knows prose, "),
        (["--depth", "9"], "--depth must be 1 to 8, not 9"),
        (["--tokens", "1024"], "--tokens must be a multiple of 128 and at least 16384, not 1024"),
        (["--out", "done"], "done holds a training that is done; name another folder with --out"),
    ],
)
def test_wrong_options_are_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / recursion.REPORT).write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert recursion.main([str(NANO), "--corpus", "none", "--out", "run", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
