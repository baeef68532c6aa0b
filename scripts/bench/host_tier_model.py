"""Decode through whole models whose caches are in host memory: tokens a second, and that every logit is the resident
path's."""

import time
from statistics import median

import torch

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cache.host_tier.grouped import host_use
from dsv4.errors import InputError
from dsv4.kernels.block_choice import Policy
from dsv4.model.dummy import fill_cache, load_dummy
from dsv4.model.gqa.choice import Attention
from dsv4.runtime.graph import DecodeGraph

WARM_UP = 4


def loaded(args) -> tuple[object, object, dict]:
    """(model of Qwen2.5-7B's widths, its filled cache in host memory, seconds that each took)."""
    begun = time.perf_counter()
    attention = Attention(Policy("block-128 bound", "bound", 128, 1, 2, args.topk))
    model = load_dummy(
        "qwen2.5-7b",
        args.layers,
        device="cuda",
        max_context=args.context,
        attention=attention,
        kv_memory=HostMemory(args.slots, ahead=True),
    )
    torch.cuda.synchronize()
    weights = time.perf_counter() - begun
    cache = model.new_cache(args.batch, args.context)
    pinned = time.perf_counter() - begun - weights
    fill_cache(cache, args.context - 4 * (args.steps + 2 * WARM_UP) - 64)
    torch.cuda.synchronize()
    return (
        model,
        cache,
        {
            "weights_seconds": weights,
            "pinning_seconds": pinned,
            "filling_seconds": time.perf_counter() - begun - weights - pinned,
        },
    )


def decode(args, model, cache) -> dict:
    """Tokens a second of captured steps: staged with a guess ahead, staged without one, and the whole cache streamed.
    Raises InputError where a staged step has other logits than the resident path over keys and values brought whole."""
    ids = torch.randint(0, model.config.vocab_size, (args.batch, 1), generator=torch.Generator().manual_seed(0))
    _check(model, cache, ids)
    away = [layer for layer in cache.layers if layer.far]
    rows, ahead, sparse = [], away[0].ahead, model.attention
    for name, branch in (("staged, guessed ahead", ahead), ("staged", None)):
        for layer in away:
            layer.ahead = branch
        rows.append({"way": name} | _timed(model, cache, args.steps))
    model.attention = Attention()
    rows.append({"way": "dense, streamed"} | _timed(model, cache, 3))
    model.attention = sparse
    return {
        "geometry": "qwen2.5-7b",
        "layers": len(model.layers),
        "context": args.context,
        "batch": args.batch,
        "weight_bytes": model.nbytes,
        "device_cache_bytes": cache.nbytes,
        "host_bytes": cache.host_bytes,
        "policy": sparse.policy.name,
        "kept": sparse.policy.kept,
        "slots": args.slots,
        "rows": rows,
    }


def flash(args) -> dict:
    """Tokens a second at Flash widths, with entries of CSA layers in host memory and on the device.

    Both decode the same tokens and must give the same logits."""
    model = load_dummy("flash", args.flash_layers, device="cuda", max_context=args.context)
    found, logits = [], []
    for name, choice in (("resident", None), ("staged", HostMemory(args.entry_slots))):
        model.kv_memory = choice
        cache = model.new_cache(args.batch, args.context)
        fill_cache(cache, args.context - 4 * (args.steps + 2 * WARM_UP) - 64)
        kept = []
        found.append({"way": name, "device_cache_bytes": cache.nbytes} | _timed(model, cache, args.steps, kept))
        logits.append(kept)
        if choice is not None:
            found[-1]["host_bytes"] = cache.host_bytes
        del cache
    if not all(torch.equal(a, b) for a, b in zip(*logits, strict=True)):
        raise InputError("logits with entries in host memory differ from those of the resident cache")
    csa = sum(layer.spec.selects for layer in model.layers)
    return {
        "geometry": "flash",
        "layers": len(model.layers),
        "csa_layers": csa,
        "context": args.context,
        "batch": args.batch,
        "weight_bytes": model.nbytes,
        "slots": args.entry_slots,
        "rows": found,
    }


def _check(model, cache, ids: torch.Tensor) -> None:
    """One token, staged and by the resident path."""
    staged = model.append(ids, cache, prompt=False)
    cache.rewind(1)
    away = [layer for layer in cache.layers if layer.far]
    ahead = away[0].ahead
    for layer in away:
        layer.ahead = None
        layer.staged = lambda step, policy: None  # then it is read whole, and blocks are chosen and gathered there
    whole = model.append(ids, cache, prompt=False)
    cache.rewind(1)
    for layer in away:
        del layer.staged
        layer.ahead = ahead
    if not torch.equal(staged, whole):
        raise InputError("the logits of a staged step differ from the resident path's; nothing was timed")


def _timed(model, cache, steps: int, kept: list | None = None) -> dict:
    """Median seconds of captured steps, on tokens that a generator draws; the cache is as long afterwards as before.
    kept: gets logits."""
    before, graph = cache.lengths, DecodeGraph(model, cache)
    ids = torch.randint(
        0, model.config.vocab_size, (WARM_UP + steps, cache.batch, 1), generator=torch.Generator().manual_seed(1)
    ).cuda()
    for fed in ids[:WARM_UP]:
        graph.step(fed)
    torch.cuda.synchronize()
    had, marks = host_use(cache), [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for fed, mark in zip(ids[WARM_UP:], marks[1:]):
        logits = graph.step(fed)
        mark.record()
        if kept is not None:
            kept.append(logits.clone())
    torch.cuda.synchronize()
    if not logits.isfinite().all():
        raise InputError("logits are not finite; no time is given")
    use, middle = host_use(cache), median(a.elapsed_time(b) for a, b in zip(marks, marks[1:])) * 1e-3
    cache.rewind([now - then for now, then in zip(cache.lengths, before)])
    found = {"seconds": middle, "tokens_a_second": cache.batch / middle}
    if use is not None:
        hits, misses = (use[k] - had[k] for k in ("hits", "misses"))
        found |= {
            "hit_rate": hits / max(1, hits + misses),
            "fetched_a_step": (use["fetched_bytes"] - had["fetched_bytes"]) / steps,
            "guessed_a_step": (use["guessed_bytes"] - had["guessed_bytes"]) / steps,
        }
    return found
