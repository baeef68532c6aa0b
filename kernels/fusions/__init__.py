"""Compositions: sequences of operations with an implementation as one kernel on some backends."""

from kernels.dispatch import Composition
from kernels.fusions import compositions as c

COMPOSITIONS = {composition.name: composition for composition in (
    Composition("linears", ("rms_norm", "linear"), c.linears),
    Composition("query_heads", ("rms_norm", "rotate"), c.query_heads),
    Composition("latent", ("rms_norm", "rotate", "simulate_fp8_blocks"), c.latent),
    Composition("index_queries", ("rotate", "hadamard", "simulate_fp4_blocks"), c.index_queries),
    Composition("store_rows", (), c.store_rows),
    Composition("pool_entries", ("gated_pool", "rms_norm", "rotate", "simulate_fp8_blocks", "hadamard", "simulate_fp4_blocks"), c.pool_entries),
    Composition("select_entries", ("index_scores", "topk_entries"), c.select_entries),
    Composition("project_heads", ("rotate", "grouped_linear"), c.project_heads),
    Composition("mhc_pre_norm", ("mhc_pre", "rms_norm"), c.mhc_pre_norm),
    Composition("mhc_post_pre_norm", ("mhc_post", "mhc_pre", "rms_norm"), c.mhc_post_pre_norm),
    Composition("moe", ("experts", "shared_expert"), c.moe),
)}
