"""Operators on NVIDIA GPUs: Triton kernels, CUDA C++ (`csrc/`, compiled at run time) where that is faster."""

from ninfer.ops.cuda.attend import gated_attention, paged_attention, sigmoid_mul
from ninfer.ops.cuda.choose import clear_counts, count_tokens, draw
from ninfer.ops.cuda.convolve import causal_conv, fold_conv
from ninfer.ops.cuda.embedding import embedding
from ninfer.ops.cuda.gating import gdn_gating
from ninfer.ops.cuda.gdn import fold_gdn, gated_delta_net, gdn_mix
from ninfer.ops.cuda.gdn_step import fold_delta_net
from ninfer.ops.cuda.likely import token_logprobs
from ninfer.ops.cuda.linear import (
    linear,
    linear_swiglu,
    logits,
    norm_linear,
    norm_linear_swiglu,
    norm_logits,
    place,
)
from ninfer.ops.cuda.norms import gated_rms_norm, rms_norm
from ninfer.ops.cuda.prepare import qk_prepare
from ninfer.ops.cuda.recording import Pool, record
from ninfer.ops.cuda.speculation import accept, count_drafts, keep_last, last_columns, next_draft, norm_pair
from ninfer.ops.cuda.stem import embedding_pair

__all__ = [
    "Pool",
    "accept",
    "causal_conv",
    "clear_counts",
    "count_drafts",
    "count_tokens",
    "draw",
    "embedding",
    "embedding_pair",
    "fold_conv",
    "fold_delta_net",
    "fold_gdn",
    "gated_attention",
    "gated_delta_net",
    "gated_rms_norm",
    "gdn_gating",
    "gdn_mix",
    "keep_last",
    "last_columns",
    "linear",
    "linear_swiglu",
    "logits",
    "next_draft",
    "norm_linear",
    "norm_linear_swiglu",
    "norm_logits",
    "norm_pair",
    "paged_attention",
    "place",
    "qk_prepare",
    "record",
    "rms_norm",
    "sigmoid_mul",
    "token_logprobs",
]
