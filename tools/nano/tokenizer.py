"""The tokenizer of ninfer-nano: `python -m tools.nano.tokenizer --corpus build/nano/corpus`.

Byte-level BPE of `BPE_TOKENS` ids, then the Qwen family's 33 added tokens in the family's order, as the four
files that a model folder holds. They are committed in tools/nano/tokenizer: a trained model depends on them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ninfer.errors import OptionError
from ninfer.frontend import maintained_template
from ninfer.frontend.tokenizer import QWEN_REGEX
from tools.nano.checkpoint import RESOURCES, TOKENIZER
from tools.nano.commands import exit_code
from tools.nano.corpus import DOMAINS, read_documents
from tools.nano.geometry import BPE_TOKENS, CONTEXT
from tools.nano.samples import task_texts

# In the family's order, from id BPE_TOKENS. The markers are visible in answers (special = false).
CONTROLS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
MARKERS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
# Only tokenizer_config.json names these.
AUDIO = (
    "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<tts_text_bos_single>", "<|audio_pad|>",
)  # fmt: skip
ADDED = (*CONTROLS, *MARKERS, *AUDIO)


def train(texts: Iterable[str]) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE trained on the texts, with the controls and markers."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN_REGEX), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    parts: Any = {
        "normalizer": normalizers.NFC(),
        "pre_tokenizer": pre_tokenizers.Sequence([split, byte_level]),
        "decoder": decoders.ByteLevel(),
    }
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_TOKENS,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [
        {"id": BPE_TOKENS + index, **_entry(token)} for index, token in enumerate((*CONTROLS, *MARKERS))
    ]
    return document


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json: all added tokens, and the named ones."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(BPE_TOKENS + index): _entry(token) for index, token in enumerate(ADDED)},
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": CONTEXT,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def generation_config() -> dict[str, Any]:
    """generation_config.json: the stop tokens, and the sampling that suits so small a model."""
    end_of_text, _, end_of_turn = range(BPE_TOKENS, BPE_TOKENS + 3)
    return {
        "do_sample": True,
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": end_of_text,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    }


def write(folder: Path, tokenizer: dict[str, Any]) -> None:
    """The four text resources of a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config(),
        "generation_config.json": generation_config(),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", "utf-8")
    (folder / "chat_template.jinja").write_text(maintained_template("qwen3_6"), "utf-8")


def training_texts(corpus: Path) -> Iterator[str]:
    """Prose, code and tasks of the training split."""
    for domain in DOMAINS:
        yield from read_documents(corpus / f"train-{domain}.txt.xz")
    yield from task_texts()


def _entry(token: str) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": token, **flags, "special": token not in MARKERS}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.nano.tokenizer", description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("build/nano/corpus"))
    parser.add_argument("--out", type=Path, default=Path("build/nano/tokenizer"))
    options = parser.parse_args(arguments)

    def run() -> None:
        if options.out.resolve() == TOKENIZER and any((TOKENIZER / role).exists() for role in RESOURCES):
            raise OptionError(f"{TOKENIZER} belongs to the trained model; name another folder with --out")
        write(options.out, train(training_texts(options.corpus)))
        print(f"wrote {options.out}")

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
