"""The small GQA model: a Qwen2 of 5.6M parameters in the transformers layout; how it is built, what it learns from, how
it is written."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, processors
from torch import nn

from dsv4.errors import InputError
from dsv4.kernels.rotary_rows.training import Whole
from dsv4.loaders.write import tensor_bytes, write_checkpoint
from dsv4.model.chat import BOS, EOS
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.gqa.model import GQAModel
from dsv4.model.linear import Storage
from dsv4.model.step import Step
from scripts.training import state
from scripts.training.architecture import BF16
from scripts.training.tokenizer import BOS_ID, EOS_ID
from scripts.training.trainee import cross_entropy, in_bf16

CONFIG = dict(
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    torch_dtype="bfloat16",
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=544,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    use_sliding_window=False,
    sliding_window=None,
    max_window_layers=6,
    attention_dropout=0.0,
    use_cache=True,
    bos_token_id=BOS_ID,
    eos_token_id=EOS_ID,
)
SHARD_BYTES = 6 << 20
EMBEDDING_STD = 0.05


def build(raw: dict, device: str) -> GQAModel:
    """The model on the `training` backend with fp32 parameters that want gradients, not yet initialised."""
    with torch.device("meta"):
        model = GQAModel(GQAConfig.from_dict(raw), BF16, "training", lambda name: Storage())
    model.to_empty(device=device)
    model.device = torch.device(device)
    return model.requires_grad_(True)


@torch.no_grad()
def initialise(model: GQAModel, seed: int) -> None:
    """Random maps of unit gain into each sublayer; maps out of it begin at 0, so that the residual stream begins as the
    embedding."""
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.fill_(0.0 if name.endswith("bias") else 1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            p.zero_()
        else:
            std = EMBEDDING_STD if name == "model.embed_tokens.weight" else p.shape[-1] ** -0.5
            p.copy_(torch.randn(p.shape, generator=g) * std)


class _Rows:
    """In the place of a layer's cache: keys and values of whole sequences go straight to attention."""

    selection = None  # training is dense

    def of(self, step: Step) -> tuple[Whole, Whole]:
        return Whole(), Whole()

    def staged(self, step: Step, policy) -> None:
        """Nothing is elsewhere."""

    def written(self, step: Step, keys: Whole, values: Whole) -> None:
        """Nothing is kept."""

    def summaries(self, step: Step) -> None:
        """Of no blocks: training is dense."""


class _Caches:
    """In the place of `GroupedCache`, for one forward over whole sequences."""

    def __init__(self, layers: int):
        self.layers = [_Rows() for _ in range(layers)]

    def guess(self, layers, i: int, step: Step) -> None:
        """Nothing is to be fetched."""


class Trainee(nn.Module):
    """Wraps the model so that one call computes everything that needs exchanged (cast) parameters, as `trainee.Trainee`
    does."""

    def __init__(self, model: GQAModel):
        super().__init__()
        self.model = model
        self.chosen: list = []  # experts: none

    def forward(
        self, ids: torch.Tensor, weight: torch.Tensor, wanted: None = None, at: int = 0
    ) -> dict[str, torch.Tensor]:
        """ids int64 [B, T + 2], weight fp32 [B, T + 2] of predicting each token (the last is not predicted: rows are
        those of the demo, whose MTP block looks a token further). Returns the loss as `next` and `total`."""
        model, B, T = self.model, ids.shape[0], ids.shape[1] - 2
        step = Step(ids[:, :T], 0, [0] * B, model.rope_frequencies())
        logits = model.head(model.features(model.run(step, _Caches(len(model.layers)))))
        loss = cross_entropy(logits, ids[:, 1 : T + 1].flatten(), weight[:, 1 : T + 1].flatten())
        return {"next": loss, "total": loss}

    def cast(self, parameters: dict[str, torch.Tensor], simulate: bool) -> dict[str, torch.Tensor]:
        """What the forward takes for the fp32 parameters: matrices in bf16. simulate: there is no such thing here."""
        return {name: in_bf16(name, p) for name, p in parameters.items()}


def export(data: Path, where: Path, out: Path, raw: dict = CONFIG) -> None:
    """Write the state in `where` as a checkpoint directory `out` in the transformers layout, bf16, with the tokenizer
    in `data`.

    Raises InputError without a state or a tokenizer and for parameters that are not finite, WriteError when `out`
    exists.
    """
    model = build(raw, "cpu")
    state.load(where, dict(Trainee(model).named_parameters()))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in parameters.items():
        if not p.isfinite().all():
            raise InputError(f"{name} holds values that are not finite; the training has diverged")
    planned = {name: ("BF16", tuple(p.shape)) for name, p in parameters.items()}
    documents = {
        "config.json": raw,
        "generation_config.json": {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID},
        "tokenizer.json": templated(data / "tokenizer.json"),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "model_max_length": raw["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    }
    write_checkpoint(
        out, planned, lambda name: parameters[name].to(torch.bfloat16), documents, max_shard_bytes=SHARD_BYTES
    )
    size = sum(tensor_bytes(*entry) for entry in planned.values())
    print(f"wrote {out}: {len(planned)} tensors, {size / 2**20:.1f} MiB")


def templated(file: Path) -> dict:
    """A tokenizer.json whose template begins every text with BOS. Raises InputError if there is none."""
    if not file.is_file():
        raise InputError(f"{file} does not exist; run scripts.training.corpus first")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return json.loads(tokenizer.to_str())
