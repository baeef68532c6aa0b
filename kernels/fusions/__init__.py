"""Compositions: sequences of operations with an implementation as one kernel on some backends."""

from dsv4.kernels.dispatch import Composition
from dsv4.kernels.experts import triton as experts_triton
from dsv4.kernels.fusions import compositions as c
from dsv4.kernels.fusions import triton_compress, triton_heads, triton_step, triton_step_inputs
from dsv4.kernels.hyper_connections import triton as mhc_triton
from dsv4.kernels.indexer import triton as indexer_triton
from dsv4.kernels.linear import triton_fused

COMPOSITIONS = {
    composition.name: composition
    for composition in (
        Composition("linears", ("rms_norm", "linear"), c.linears, {"triton": triton_fused.linears}),
        Composition("query_heads", ("rms_norm", "rotate"), c.query_heads, {"triton": triton_heads.query_heads}),
        Composition("latent", ("rms_norm", "rotate", "simulate_fp8_blocks"), c.latent, {"triton": triton_heads.latent}),
        Composition(
            "index_queries",
            ("rotate", "hadamard", "simulate_fp4_blocks"),
            c.index_queries,
            {"triton": triton_heads.index_queries},
        ),
        Composition("store_rows", (), c.store_rows),
        Composition(
            "pool_entries",
            ("gated_pool", "rms_norm", "rotate", "simulate_fp8_blocks", "hadamard", "simulate_fp4_blocks"),
            c.pool_entries,
            {"triton": triton_compress.pool_entries},
        ),
        Composition(
            "select_entries",
            ("index_scores", "topk_entries"),
            c.select_entries,
            {"triton": indexer_triton.select_entries},
        ),
        Composition(
            "project_heads", ("rotate", "grouped_linear"), c.project_heads, {"triton": triton_fused.project_heads}
        ),
        Composition("mhc_pre_norm", ("mhc_pre", "rms_norm"), c.mhc_pre_norm, {"triton": mhc_triton.mhc_pre_norm}),
        Composition(
            "mhc_post_pre_norm",
            ("mhc_post", "mhc_pre", "rms_norm"),
            c.mhc_post_pre_norm,
            {"triton": mhc_triton.mhc_post_pre_norm},
        ),
        Composition(
            "mhc_post_head_norm",
            ("mhc_post", "mhc_head", "rms_norm"),
            c.mhc_post_head_norm,
            {"triton": triton_step.mhc_post_head_norm},
        ),
        Composition(
            "attention_inputs",
            (
                "rms_norm",
                "rotate",
                "simulate_fp8_blocks",
                "hadamard",
                "simulate_fp4_blocks",
                "gated_pool",
                "write_rows",
            ),
            c.attention_inputs,
            {"triton": triton_step_inputs.attention_inputs},
        ),
        Composition("place", (), c.place, {"triton": triton_step.place}),
        Composition("embed_streams", (), c.embed_streams, {"triton": triton_step.embed_streams}),
        Composition("chosen_rows", (), c.chosen_rows, {"triton": triton_step.chosen_rows}),
        Composition("moe", ("experts", "shared_expert"), c.moe, {"triton": experts_triton.moe}),
    )
}
