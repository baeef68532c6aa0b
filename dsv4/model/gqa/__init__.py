"""GQA models (`dsv4.loaders.decoders.DECODERS`), in the transformers layout, on the engine of the DeepSeek-V4 model.

`config` reads config.json strictly, `rope` has the rotary variants, `model` the modules (named after the tensors of the
file), `cache` the keys and values, `paged` keys and values in pages that requests share, `load` the ledger between file
and parameters.
"""
