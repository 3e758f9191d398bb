"""The proposal head: the output rows of the likeliest tokens, for drafting over a smaller vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ninfer.convert.parameters import TEXT, Parameter
from ninfer.convert.recipe import Recipe
from ninfer.convert.views import Computed, Rows, View
from ninfer.errors import ConversionError

HEAD = "proposal/head"
TOKEN_IDS = "proposal/token_ids"
ROWS = 131_072


@dataclass(frozen=True)
class ProposalOptions:
    """`rows`: size of the draft vocabulary.

    `ranking`: a file of little-endian int64 rows of `vocab_size` counts, of which the first is used;
    without one, lower ids count as more frequent, because byte-pair merges are learned in that order.
    """

    rows: int = ROWS
    ranking: Path | None = None


def select(options: ProposalOptions, resources: Mapping[str, bytes], vocab: int) -> np.ndarray:
    """Token ids `[rows]` int64: all special tokens and the most frequent others, by descending count."""
    public, special = _tokens(resources)
    if not 1 <= options.rows <= public:
        raise ConversionError(
            f"a proposal head of {options.rows} rows needs as many tokens; the tokenizer has {public}; "
            f"use --proposal-rows"
        )
    counts = np.arange(vocab, 0, -1) if options.ranking is None else _read_counts(options.ranking, vocab)
    ranked = np.argsort(-counts[:public], kind="stable")
    forced = np.array(sorted(special), dtype=np.int64)
    others = ranked[~np.isin(ranked, forced)][: max(0, options.rows - len(forced))]
    chosen = np.concatenate((others, forced))
    return chosen[np.argsort(-counts[chosen], kind="stable")][: options.rows]


def declare(rows: int, hidden: int, components: Mapping[str, Any]) -> list[Parameter]:
    """The two parameters, for the draft components of this artifact."""
    inputs = tuple(f"{component}/final_hidden" for component in components if component != TEXT)
    if not inputs:
        raise ConversionError(
            "a proposal head serves a draft component; convert one as well (--components text,mtp)"
        )
    return [
        Parameter(HEAD, (rows, hidden), "proposal", inputs),
        Parameter(TOKEN_IDS, (rows,), "proposal", (), "int32", is_direct=True),
    ]


def views(ids: np.ndarray, head: View) -> dict[str, View]:
    """Rows `ids` of the output head, and the ids themselves."""
    if not isinstance(head, Rows):
        raise ConversionError("the output head is no matrix; a proposal head cannot be cut from it")
    return {
        HEAD: Rows(head.tensor, head.shape, ids),
        TOKEN_IDS: Computed(TOKEN_IDS, torch.from_numpy(ids).to(torch.int32)),
    }


def configure(recipe: Recipe) -> None:
    """4-bit groups, whatever the recipe says about everything else."""
    recipe.assign(HEAD, format="q4_g64_fp16", method="grouped_absmax", source="base")
    recipe.use(HEAD, activation_policy="A16Only")


def _tokens(resources: Mapping[str, bytes]) -> tuple[int, set[int]]:
    """Number of public tokens, and the special ones."""
    try:
        tokenizer = json.loads(resources["tokenizer.json"])
        config = json.loads(resources["tokenizer_config.json"])
        ids = set(tokenizer["model"]["vocab"].values())
        added = {
            int(token["id"]): bool(token.get("special")) for token in tokenizer.get("added_tokens") or ()
        }
        decoder = config.get("added_tokens_decoder") or {}
        added |= {int(index): bool(token.get("special")) for index, token in decoder.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConversionError(
            f"the tokenizer's tokens cannot be counted for the proposal head: {error!r}"
        ) from None
    ids |= set(added)
    if ids != set(range(len(ids))):
        raise ConversionError("the tokenizer's ids are not contiguous from 0; no proposal head can be made")
    return len(ids), {index for index, is_special in added.items() if is_special}


def _read_counts(path: Path, vocab: int) -> np.ndarray:
    try:
        size = path.stat().st_size
        if size == 0 or size % (8 * vocab):
            raise ConversionError(
                f"the ranking {path} has {size} bytes; it must hold rows of {vocab} 8-byte counts"
            )
        return np.fromfile(path, "<i8", vocab).astype(np.int64)
    except OSError as error:
        raise ConversionError(f"the ranking {path} cannot be read: {error.strerror or error}") from None
