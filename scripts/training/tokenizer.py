"""The small model's tokenizer: byte-level BPE whose digits stand alone."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dsv4.model.chat import ASSISTANT, BOS, END_THINK, EOS, THINK, USER

CONTROL = [BOS, EOS, USER, ASSISTANT, THINK, END_THINK]
BOS_ID, EOS_ID = 0, 1


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """BPE over the texts, with DeepSeek's control tokens first (BOS=0, EOS=1).

    Digits are split one by one, so that a number is a sequence to be copied rather than a rare token to be recalled.
    They are split first: the byte-level rule after them would otherwise have glued a space to a number already ("
    48213").
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True) for t in CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A control token's name inside a document is ordinary text.
    tokenizer.encode_special_tokens = True
    return tokenizer
