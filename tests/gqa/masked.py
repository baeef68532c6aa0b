"""A decoder of its own in fp64, whole sequences, with a mask of what each query may read: the oracle of sparse
attention in a model.

It shares no code with the model, the kernels or transformers; with the causal mask it is held against transformers
(`test_sparse`).
"""

import torch

Mask = torch.Tensor  # bool [KV, T, T] or [H, T, T]


def forward(weights: dict[str, torch.Tensor], config: dict, ids: torch.Tensor, mask) -> torch.Tensor:
    """Logits fp64 [T, vocab] of ids [T]. mask(layer, q [H, T, D], k [KV, T, D]) → which keys each query reads: of a KV
    head's group [KV, T, T], or of a query head [H, T, T]."""
    w = {name: t.double() for name, t in weights.items()}
    H, KV, eps, T = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"], len(ids)
    D = config.get("head_dim", config["hidden_size"] // H)
    x = w["model.embed_tokens.weight"][ids]
    angle = torch.arange(T).double()[:, None] * config["rope_theta"] ** (-torch.arange(0, D, 2).double() / D)
    cos, sin = angle.cos(), angle.sin()

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[name]

    def turned(x):
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."

        def mapped(y, name):
            return y @ w[f"{at}{name}.weight"].T + w.get(f"{at}{name}.bias", 0)

        y = norm(x, f"{at}input_layernorm.weight")
        q, k, v = (mapped(y, f"self_attn.{n}_proj").view(T, -1, D).transpose(0, 1) for n in "qkv")
        q, k = turned(q), turned(k)
        seen = mask(i, q, k)
        seen = seen.repeat_interleave(H // len(seen), 0)
        k, v = (t.repeat_interleave(H // KV, 0) for t in (k, v))
        p = (q @ k.transpose(1, 2) / D**0.5).masked_fill(~seen, float("-inf")).softmax(-1)
        x = x + mapped((p @ v).transpose(0, 1).reshape(T, -1), "self_attn.o_proj")
        y = norm(x, f"{at}post_attention_layernorm.weight")
        gate = mapped(y, "mlp.gate_proj")
        x = x + mapped(gate * torch.sigmoid(gate) * mapped(y, "mlp.up_proj"), "mlp.down_proj")
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm.weight") @ w[head].T


def causal(layer: int, q: torch.Tensor, k: torch.Tensor) -> Mask:
    return torch.ones(len(k), k.shape[1], k.shape[1]).tril().bool()


def kept_blocks(selector: str | None, block: int, sink: int, local: int, topk: int, prompt: int):
    """Queries from `prompt` on read the sink blocks, the newest and the best; those before read everything."""

    def mask(layer, q, k):
        KV, T, _ = k.shape
        seen = causal(layer, q, k)
        for t in range(prompt, T):
            now = t // block
            for h, group in enumerate(q.view(KV, len(q) // KV, T, -1)[:, :, t]):
                distant, score = range(sink, now - local + 1), {}
                for b in distant if selector else ():
                    keys = k[h, b * block : (b + 1) * block]
                    if selector == "bound":
                        low, high = keys.min(0).values, keys.max(0).values
                        score[b] = max(float(torch.maximum(one * low, one * high).sum()) for one in group)
                    else:
                        score[b] = float(group.mean(0) @ keys.mean(0))
                best = sorted(score, key=lambda b: -score[b])[:topk]
                keep = {*range(sink), *range(now - local + 1, now + 1), *best}
                seen[h, t] &= torch.tensor([s // block in keep for s in range(T)])
        return seen

    return mask


def chunks(S: int, L: int, M: int, prompt: int, score: str = "fused", heads: str = "kv"):
    """Queries before `prompt` read their chunk and a memory of M tokens, the last L among them; those from there on
    read everything."""

    def mask(layer, q, k):
        if heads == "query":
            k = k.repeat_interleave(len(q) // len(k), 0)
        KV, T, D = k.shape
        seen = causal(layer, q, k)
        logits = (q.view(KV, -1, T, D) @ k.transpose(1, 2).unsqueeze(1)) / D**0.5
        for h in range(KV):
            memory: dict[int, float] = {}  # position → score
            for first in range(0, prompt, S):
                own, last = range(first, min(first + S, prompt)), min(first + S, prompt)
                fresh = dict.fromkeys(own, 0.0)
                for t in own:
                    seen[h, t, :first] = False
                    seen[h, t, list(memory)] = True
                    for one in logits[h, :, t]:
                        p = one[first : t + 1].softmax(-1)
                        for s, given in zip(range(first, t + 1), p.tolist()):
                            fresh[s] += given
                        shared = [*memory, *(range(first, t + 1) if score == "fused" else ())]
                        p = one[shared].softmax(-1)
                        for s, given in zip(list(memory), p.tolist()):
                            memory[s] += given
                older = {s: v for s, v in (memory | fresh).items() if s < last - L}
                heavy = sorted(older, key=lambda s: (-older[s], s))[: M - L]
                memory = {s: (memory | fresh)[s] for s in [*heavy, *range(last - L, last)]}
        return seen

    return mask
