"""The proposal head: the output rows of the likeliest tokens, for drafting over a smaller vocabulary."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ninfer.convert.parameters import DRAFTERS, Parameter
from ninfer.convert.recipe import Recipe
from ninfer.convert.views import Computed, Rows, View
from ninfer.errors import ConversionError

HEAD = "proposal/head"
TOKEN_IDS = "proposal/token_ids"
ROWS = 131_072
FORMAT, METHOD, POLICY = "q4_g64_fp16", "grouped_absmax", "A16Only"


@dataclass(frozen=True)
class ProposalOptions:
    """`rows`: size of the draft vocabulary (None: `ROWS`, or all tokens of a tokenizer that has fewer).

    `ranking`: a file of little-endian int64 rows of `vocab_size` counts, of which the first is used;
    without one, lower ids count as more frequent, because byte-pair merges are learned in that order.
    """

    rows: int | None = None
    ranking: Path | None = None


@dataclass(frozen=True)
class Tokens:
    """What a draft vocabulary may be chosen from: ids below `public`, of which `special` ones are forced."""

    public: int
    special: frozenset[int]

    @classmethod
    def of(cls, resources: Mapping[str, bytes]) -> Tokens:
        """Read from the tokenizer's files (role -> bytes). Raises ConversionError."""
        return cls(*_tokens(resources))

    def rows(self, wanted: int | None) -> int:
        """The size of the draft vocabulary; ConversionError if there aren't so many tokens."""
        rows = min(ROWS, self.public) if wanted is None else wanted
        if not 1 <= rows <= self.public:
            raise ConversionError(
                f"a proposal head has from 1 to {self.public} rows, as many as the tokenizer has tokens, "
                f"not {rows}"
            )
        return rows


def choose(counts: np.ndarray, tokens: Tokens, rows: int) -> np.ndarray:
    """Token ids `[rows]` int64: all special tokens and the most frequent others, by descending count.

    counts: int64, one per vocabulary row; rows that are no token don't count. Of equally frequent tokens
    lower ids are taken. In the result they stand by id, too, but special ones behind the others. If there are
    more special tokens than rows, the most frequent of them are all there is.
    """
    ranked = np.argsort(-counts[: tokens.public], kind="stable")
    forced = np.array(sorted(tokens.special), dtype=np.int64)
    others = ranked[~np.isin(ranked, forced)][: max(0, rows - len(forced))]
    chosen = np.concatenate((others, forced))
    return chosen[np.argsort(-counts[chosen], kind="stable")][:rows]


def select(options: ProposalOptions, resources: Mapping[str, bytes], vocab: int) -> np.ndarray:
    """The token ids that the options ask for, by `choose`."""
    tokens = Tokens.of(resources)
    rows = tokens.rows(options.rows)
    counts = np.arange(vocab, 0, -1) if options.ranking is None else read_counts(options.ranking, vocab)
    return choose(counts, tokens, rows)


def read_counts(path: Path, vocab: int) -> np.ndarray:
    """The first row of a ranking file: int64 `[vocab]`. Raises ConversionError."""
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise ConversionError(f"the ranking {path} is no regular file")
        if facts.st_size == 0 or facts.st_size % (8 * vocab):
            raise ConversionError(
                f"the ranking {path} has {facts.st_size} bytes; it must hold rows of {vocab} 8-byte "
                f"counts, one for each row of the model's vocabulary"
            )
        counts = np.fromfile(path, "<i8", vocab).astype(np.int64)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConversionError(f"the ranking {path} cannot be read: {reason}") from None
    if int(counts.min()) < 0:
        raise ConversionError(f"the ranking {path} has a negative count for token {int(counts.argmin())}")
    if not counts.any():
        raise ConversionError(f"the ranking {path} holds nothing but zeros; it ranks no token")
    return counts


def vocabulary(config: Mapping[str, Any]) -> int:
    """Rows of a text config's vocabulary: as many counts as a ranking has."""
    return size(config, "vocab_size")


def size(config: Mapping[str, Any], name: str) -> int:
    """A size that a text config states. Raises ConversionError."""
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConversionError(f"the text config needs a positive integer '{name}', not {value!r:.80}")
    return value


def declare(rows: int, hidden: int, components: Iterable[str]) -> list[Parameter]:
    """The two parameters, for the draft components of this artifact."""
    inputs = tuple(f"{component}/final_hidden" for component in components if component in DRAFTERS)
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
    recipe.assign(HEAD, format=FORMAT, method=METHOD, source="base")
    recipe.use(HEAD, activation_policy=POLICY)


def _tokens(resources: Mapping[str, bytes]) -> tuple[int, frozenset[int]]:
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
    return len(ids), frozenset(index for index, is_special in added.items() if is_special)
