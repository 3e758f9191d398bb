"""Operators: one contract each, dispatched on the device of their input.

Activations are bf16; every operator also takes float32 (a mode for tests: all mathematics and the output are
float32 then). T columns are B requests of W columns each, flattened row by row.
"""

from ninfer.ops.attention import PAGE, KvPages, gated_attention, paged_attention, qk_prepare
from ninfer.ops.conv import causal_conv, fold_conv
from ninfer.ops.delta import (
    CHUNK,
    RECORD_COLUMNS,
    DeltaRecords,
    fold_delta_net,
    gated_delta_net,
    gdn_gating,
)
from ninfer.ops.embedding import embedding
from ninfer.ops.fused import (
    GdnMixer,
    embedding_pair,
    fold_gdn,
    gdn_mix,
    norm_linear,
    norm_linear_swiglu,
    norm_logits,
)
from ninfer.ops.gate import sigmoid_mul
from ninfer.ops.linear import linear, linear_swiglu, logits
from ninfer.ops.norms import gated_rms_norm, rms_norm
from ninfer.ops.recording import Recording, recording_pool
from ninfer.ops.rope import Rope
from ninfer.ops.sampling import (
    CANDIDATES,
    Draws,
    Purpose,
    SamplingParams,
    clear_counts,
    count_tokens,
    draw,
    mask_words,
    sample,
    token_logprobs,
    uniform,
)
from ninfer.ops.speculation import accept, count_drafts, keep_last, last_columns, next_draft, norm_pair
from ninfer.ops.weights import (
    ActivationPolicy,
    Encoded,
    Matrix,
    Role,
    RowSpan,
    Upload,
    place,
    uploading,
)
from ninfer.ops.workspace import Workspace, workspace

__all__ = [
    "CANDIDATES",
    "CHUNK",
    "PAGE",
    "RECORD_COLUMNS",
    "ActivationPolicy",
    "DeltaRecords",
    "Draws",
    "Encoded",
    "GdnMixer",
    "KvPages",
    "Matrix",
    "Purpose",
    "Recording",
    "Role",
    "Rope",
    "RowSpan",
    "SamplingParams",
    "Upload",
    "Workspace",
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
    "mask_words",
    "next_draft",
    "norm_linear",
    "norm_linear_swiglu",
    "norm_logits",
    "norm_pair",
    "paged_attention",
    "place",
    "qk_prepare",
    "recording_pool",
    "rms_norm",
    "sample",
    "sigmoid_mul",
    "token_logprobs",
    "uniform",
    "uploading",
    "workspace",
]
