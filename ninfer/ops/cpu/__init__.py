"""Operators on the CPU: Numba kernels on PyTorch's thread pool, PyTorch where its own are as good."""

from ninfer.ops.cpu.attend import paged_attention
from ninfer.ops.cpu.choose import clear_counts, count_tokens, draw
from ninfer.ops.cpu.convolve import causal_conv, fold_conv
from ninfer.ops.cpu.delta import fold_delta_net, gated_delta_net
from ninfer.ops.cpu.gates import gdn_gating, sigmoid_mul
from ninfer.ops.cpu.heads import qk_prepare
from ninfer.ops.cpu.kernel import machine_threads
from ninfer.ops.cpu.likely import token_logprobs
from ninfer.ops.cpu.normalize import gated_rms_norm, rms_norm
from ninfer.ops.cpu.products import embedding, linear, linear_swiglu, logits
from ninfer.ops.cpu.recording import record
from ninfer.ops.cpu.speculation import accept, count_drafts, keep_last, last_columns, next_draft, norm_pair

__all__ = [
    "accept",
    "causal_conv",
    "clear_counts",
    "count_drafts",
    "count_tokens",
    "draw",
    "embedding",
    "fold_conv",
    "fold_delta_net",
    "gated_delta_net",
    "gated_rms_norm",
    "gdn_gating",
    "keep_last",
    "last_columns",
    "linear",
    "linear_swiglu",
    "logits",
    "machine_threads",
    "next_draft",
    "norm_pair",
    "paged_attention",
    "qk_prepare",
    "record",
    "rms_norm",
    "sigmoid_mul",
    "token_logprobs",
]
