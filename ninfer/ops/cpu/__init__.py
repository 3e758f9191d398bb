"""Operators on the CPU."""

from ninfer.ops.cpu.plain import (
    causal_conv,
    embedding,
    gated_delta_net,
    gated_rms_norm,
    gdn_gating,
    linear,
    linear_swiglu,
    logits,
    paged_attention,
    qk_prepare,
    rms_norm,
    sample,
    sigmoid_mul,
)

__all__ = [
    "causal_conv",
    "embedding",
    "gated_delta_net",
    "gated_rms_norm",
    "gdn_gating",
    "linear",
    "linear_swiglu",
    "logits",
    "paged_attention",
    "qk_prepare",
    "rms_norm",
    "sample",
    "sigmoid_mul",
]
