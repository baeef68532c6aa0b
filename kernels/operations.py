"""Every operation that a model binds, by name: `OPERATIONS` of the DeepSeek-V4 model, `TIER_OPERATIONS` of one with
entries or experts in host memory, `GQA_OPERATIONS` of GQA models."""

from dsv4.kernels.attention import hca_attention, sparse_attention
from dsv4.kernels.block_choice import choose_blocks
from dsv4.kernels.block_summaries import summarise_blocks
from dsv4.kernels.cache_rows import write_rows
from dsv4.kernels.chunked_prefill import chunked_prefill
from dsv4.kernels.compress import gated_pool
from dsv4.kernels.experts import experts, shared_expert
from dsv4.kernels.gather_attention import gather_attention
from dsv4.kernels.grouped_attention import grouped_attention
from dsv4.kernels.hadamard import hadamard
from dsv4.kernels.hyper_connections import mhc_head, mhc_post, mhc_pre
from dsv4.kernels.indexer import index_scores, topk_entries
from dsv4.kernels.linear import grouped_linear, linear
from dsv4.kernels.quantize import simulate_fp4_blocks, simulate_fp8_blocks
from dsv4.kernels.rms_norm import rms_norm
from dsv4.kernels.rope import rotate
from dsv4.kernels.rotary_rows import rotary_rows
from dsv4.kernels.router import route_hashed, route_scored
from dsv4.kernels.silu_mul import silu_mul
from dsv4.kernels.staging import bring, fetch, write_back

OPERATIONS = {
    op.name: op
    for op in (
        experts,
        gated_pool,
        grouped_linear,
        hadamard,
        hca_attention,
        index_scores,
        linear,
        mhc_head,
        mhc_post,
        mhc_pre,
        rms_norm,
        rotate,
        route_hashed,
        route_scored,
        shared_expert,
        simulate_fp4_blocks,
        simulate_fp8_blocks,
        sparse_attention,
        topk_entries,
        write_rows,
    )
}
GQA_OPERATIONS = {
    op.name: op
    for op in (
        choose_blocks,
        chunked_prefill,
        fetch,
        gather_attention,
        grouped_attention,
        linear,
        rms_norm,
        rotary_rows,
        silu_mul,
        summarise_blocks,
        write_back,
    )
}
TIER_OPERATIONS = {op.name: op for op in (bring, fetch)}
