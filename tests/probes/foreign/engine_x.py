"""A stand-in for another implementation, with the modules that the README's example names.

They compute what this project's model does, but are called by keyword, run flat tokens, and return tuples.
"""

import torch

from dsv4 import load_model


class Named(torch.nn.Module):
    """attention(hidden_states=…) → (output, None)"""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *, hidden_states, rest):
        return self.inner(hidden_states, *rest), None


class Bridge(torch.nn.Module):
    """What stands in the model's place: the named module, called by keyword."""

    def __init__(self, inner):
        super().__init__()
        self.named = Named(inner)

    def forward(self, x, *rest):
        return self.named(hidden_states=x, rest=rest)[0]

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("named").inner, name)


class Engine:
    version = "1"

    def __init__(self, path):
        self.model = load_model(path, numerics="fp32")
        self.layers = self.model.layers
        for layer in self.layers:
            layer.attn, layer.ffn = Bridge(layer.attn), Bridge(layer.ffn)
            layer.attention, layer.mlp = layer.attn.named, layer.ffn.named

    def new_state(self, rows, tokens):
        return State(self.model.new_cache(rows, tokens))

    def forward(self, ids, state):
        return self.model.append(ids, state.cache, chunk=ids.shape[1]), None


class State:
    def __init__(self, cache):
        self.cache = cache

    @property
    def layers(self):
        return [Held(layer.main) for layer in self.cache.layers]


class Held:
    def __init__(self, compressor):
        self.entries = None if compressor is None else compressor.entries.held()
