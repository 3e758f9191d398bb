"""A small byte-level BPE with Qwen's added tokens, trained here; and a Llama-like one with Digits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers import decoders as token_decoders

from ninfer.frontend import Frontend, maintained_template
from ninfer.frontend.tokenizer import QWEN_REGEX

# Machines that run several things at once must not fail a test for its speed.
settings.register_profile("frontend", deadline=None)
settings.load_profile("frontend")

QWEN = "Qwen3_5ForCausalLM"
LLAMA = "LlamaForCausalLM"
VISIBLE = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
HIDDEN = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
CONFIG_ONLY = (
    "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<tts_text_bos_single>", "<|audio_pad|>",
)  # fmt: skip
CORPUS = [
    "The quick brown fox jumps over the lazy dog. I'll think about it, and they've answered already.",
    "Wie schön, daß die Füße größer sind; où est l'élève? Le garçon naïf mange un gâteau.",
    "いろはにほへと ちりぬるを わかよたれそ つねならむ。漢字もあります。",
    "مرحبا بالعالم، كيف حالك اليوم؟ שלום עולם",
    "emoji 👩‍👩‍👧‍👦 👍🏽 🇩🇪 e\u0301 and numbers 1234567890, x == y != z; def f(a, b): return a + b",
    "</thinking> <thought> <|im_like|> <tool> call </tool>",
] * 20


def _train(pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: Any) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    if normalizer is not None:
        tokenizer.normalizer = normalizer  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = token_decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return json.loads(tokenizer.to_str())


def added(token_id: int, content: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **flags, "special": special}


class Documents:
    """Parsed resources that a test may change before use."""

    def __init__(self, tokenizer: dict, config: dict, template: str, generation: dict) -> None:
        self.tokenizer, self.config, self.template, self.generation = tokenizer, config, template, generation

    def resources(self) -> dict[str, bytes]:
        return {
            "tokenizer.json": json.dumps(self.tokenizer).encode(),
            "tokenizer_config.json": json.dumps(self.config).encode(),
            "chat_template.jinja": self.template.encode(),
            "generation_config.json": json.dumps(self.generation).encode(),
        }

    def copy(self) -> "Documents":
        return Documents(
            *json.loads(json.dumps([self.tokenizer, self.config, self.template, self.generation]))
        )


def _qwen_documents() -> Documents:
    split = pre_tokenizers.Split(_regex(QWEN_REGEX), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = _train(pre_tokenizers.Sequence([split, byte_level]), normalizers.NFC())  # pyright: ignore
    first = len(tokenizer["model"]["vocab"])
    contents = [(c, True) for c in HIDDEN] + [(c, False) for c in VISIBLE]
    tokenizer["added_tokens"] = [added(first + i, c, s) for i, (c, s) in enumerate(contents)]
    later = first + len(contents)
    decoder = {str(later + i): added(0, c, True) for i, c in enumerate(CONFIG_ONLY)}
    for entry in decoder.values():
        del entry["id"]
    decoder[str(first)] = {k: v for k, v in tokenizer["added_tokens"][0].items() if k != "id"}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "added_tokens_decoder": decoder,
    }
    return Documents(tokenizer, config, maintained_template("qwen3_6"), {"eos_token_id": [first + 2, first]})


def _regex(pattern: str) -> Any:
    from tokenizers import Regex

    return Regex(pattern)


LLAMA_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _llama_documents() -> Documents:
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = _train(pre_tokenizers.Sequence([digits, byte_level]), None)  # pyright: ignore
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # As a converter writes it from a GGUF file: special tokens come first and are in the vocabulary too.
    vocab = {token: i + len(special) for token, i in tokenizer["model"]["vocab"].items()}
    tokenizer["model"]["vocab"] = {**{token: i for i, token in enumerate(special)}, **vocab}
    tokenizer["added_tokens"] = [added(i, token, True) for i, token in enumerate(special)]
    config = {"add_bos_token": False, "bos_token": "<|im_start|>", "pad_token": "<|im_end|>"}
    return Documents(tokenizer, config, LLAMA_TEMPLATE, {"eos_token_id": 2})


_QWEN_DOCUMENTS = _qwen_documents()
_LLAMA_DOCUMENTS = _llama_documents()


@pytest.fixture
def qwen_documents() -> Documents:
    return _QWEN_DOCUMENTS.copy()


@pytest.fixture
def llama_documents() -> Documents:
    return _LLAMA_DOCUMENTS.copy()


@pytest.fixture(scope="session")
def qwen() -> Frontend:
    return Frontend.from_resources(_QWEN_DOCUMENTS.resources(), architecture=QWEN, vocab_rows=1000)


@pytest.fixture(scope="session")
def llama() -> Frontend:
    return Frontend.from_resources(_LLAMA_DOCUMENTS.resources(), architecture=LLAMA, vocab_rows=1000)


SMOLLM2 = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Frontend:
    """The real tokenizer and template of SmolLM2; skips where the model is missing."""
    if not SMOLLM2.exists():
        pytest.skip("SmolLM2 has not been fetched (make demo)")
    artifact = pytest.importorskip("ninfer.artifact")
    convert = pytest.importorskip("ninfer.convert")
    with artifact.Artifact.open(convert.ensure_artifact(SMOLLM2, tmp_path_factory.mktemp("cache"))) as opened:
        roles = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
        resources = {role: opened.resource("text", role) for role in roles}
    return Frontend.from_resources(resources, architecture=LLAMA, vocab_rows=49152)


@pytest.fixture(scope="session")
def with_template() -> Callable[[str], Frontend]:
    """A Qwen frontend with another chat template."""
    resources = _QWEN_DOCUMENTS.resources()
    return lambda source: Frontend.from_resources(
        resources, architecture=QWEN, vocab_rows=1000, chat_template=source
    )


@pytest.fixture(scope="session")
def reference() -> Tokenizer:
    """The whole Qwen-like tokenizer in the Rust library, which takes every control spelling for the token."""
    documents = _QWEN_DOCUMENTS.copy()
    for key, entry in documents.config["added_tokens_decoder"].items():
        if int(key) > documents.tokenizer["added_tokens"][-1]["id"]:
            documents.tokenizer["added_tokens"].append({"id": int(key), **entry})
    return Tokenizer.from_str(json.dumps(documents.tokenizer))
