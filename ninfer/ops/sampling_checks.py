"""What tensors of `sampling.py` must be like, for every backend."""

from __future__ import annotations

import torch

from ninfer.errors import OptionError
from ninfer.ops.sampling import CANDIDATES, Draws, mask_words

REALS = ("temperature", "top_p", "min_p", "presence", "frequency")
INTEGERS = ("top_k", "seed", "position", "purpose", "count_rows", "mask_row")


def check_draws(
    logits: torch.Tensor, draws: Draws, counts: torch.Tensor, masks: torch.Tensor | None
) -> list[torch.Tensor]:
    """The fields of the draws, reals before integers."""
    check_scores(logits)
    rows, size = logits.shape
    check_counts(counts, size)
    if masks is not None:
        _check_masks(masks, size)
    fields = [getattr(draws, name) for name in (*REALS, *INTEGERS)]
    for name, field in zip((*REALS, *INTEGERS), fields, strict=True):
        kind = torch.float64 if name in REALS else torch.int64 if name == "seed" else torch.int32
        if field.shape != (rows,) or field.dtype != kind or not field.is_contiguous():
            raise OptionError(
                f"{name} of {rows} draws must be contiguous {kind} [{rows}], "
                f"got {field.dtype} {tuple(field.shape)}"
            )
    return fields


def drawn_into(out: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """`out` if it can hold a token of each row, or a new tensor."""
    rows = logits.shape[0]
    if out is None:
        return torch.empty(rows, dtype=torch.int32, device=logits.device)
    if out.shape != (rows,) or out.dtype != torch.int32 or not out.is_contiguous():
        raise OptionError(
            f"tokens of {rows} draws go to contiguous int32 [{rows}], not {out.dtype} {tuple(out.shape)}"
        )
    return out


def check_scores(logits: torch.Tensor) -> None:
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise OptionError(f"scores must be contiguous float32, got {logits.dtype}")


def check_counts(counts: torch.Tensor, size: int) -> None:
    if counts.dtype != torch.int32 or counts.shape[1] != size or not counts.is_contiguous():
        raise OptionError(f"counts must be contiguous int32 [rows, {size}], got {tuple(counts.shape)}")


def check_counting(tokens: torch.Tensor, count_rows: torch.Tensor, counts: torch.Tensor) -> None:
    check_counts(counts, counts.shape[1])
    if tokens.shape != count_rows.shape or not tokens.dtype == count_rows.dtype == torch.int32:
        raise OptionError(
            f"tokens and count rows must be int32 of one length, got {tokens.dtype} {tuple(tokens.shape)} "
            f"and {count_rows.dtype} {tuple(count_rows.shape)}"
        )


def check_clearing(count_rows: torch.Tensor, counts: torch.Tensor) -> None:
    check_counts(counts, counts.shape[1])
    if count_rows.dtype != torch.int32:
        raise OptionError(f"count rows must be int32, got {count_rows.dtype}")


def check_reports(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    wanted: torch.Tensor,
    logprob: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
) -> None:
    """Do the tensors of `token_logprobs` fit?"""
    check_scores(logits)
    rows = logits.shape[0]
    for name, tensor, kind, shape in (
        ("tokens", tokens, torch.int32, (rows,)),
        ("wanted", wanted, torch.int32, (rows,)),
        ("logprob", logprob, torch.float32, (rows,)),
        ("top_ids", top_ids, torch.int32, (rows, CANDIDATES)),
        ("top_logprobs", top_logprobs, torch.float32, (rows, CANDIDATES)),
    ):
        if tensor.shape != shape or tensor.dtype != kind or not tensor.is_contiguous():
            raise OptionError(
                f"{name} of {rows} rows must be contiguous {kind} {list(shape)}, got {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )


def _check_masks(masks: torch.Tensor, size: int) -> None:
    words = mask_words(size)
    if masks.dtype != torch.int32 or masks.dim() != 2 or masks.shape[1] != words or not masks.is_contiguous():
        raise OptionError(
            f"masks of {size} tokens must be contiguous int32 [rows, {words}], got {masks.dtype} "
            f"{tuple(masks.shape)}"
        )
