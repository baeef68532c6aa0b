"""The checkpoint's tokenizer.json, and text that arrives token by token."""

from pathlib import Path

from dsv4.errors import InputError


class Tokenizer:
    """Wraps `tokenizers.Tokenizer`. User text never becomes control tokens."""

    def __init__(self, path: Path, vocab_size: int):
        from tokenizers import Tokenizer as Backend

        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            raise InputError(f"{path} has no tokenizer.json; copy the model's there, or pass --token-ids")
        try:
            self.backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for any malformed file
            raise InputError(f"{file} is not a tokenizer ({str(error)[:80]}); fetch it again") from None
        if self.backend.get_vocab_size() > vocab_size:
            raise InputError(
                f"{file} has {self.backend.get_vocab_size()} tokens, the model {vocab_size}; it is another model's"
            )
        self.special = {t.content: i for i, t in self.backend.get_added_tokens_decoder().items() if t.special}

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: names of special tokens in it are split up like any other text. Raises InputError
        for text that is no Unicode."""
        return self._encode(text, False)

    def encode_templated(self, text: str) -> list[int]:
        """Token ids of plain text, with the control tokens that the tokenizer's own template puts around it (begin of
        text, say). Raises InputError as `encode`."""
        return self._encode(text, True)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            # half of a surrogate pair, or a byte that was not UTF-8 where it was read, is not a character
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text has {text[error.start]!r} at character {error.start + 1}, which is no Unicode; "
                "expected UTF-8"
            ) from None
        self.backend.encode_special_tokens = True
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def control(self, token: str) -> int:
        """Id of a control token. Raises InputError naming it when the tokenizer has none."""
        if token not in self.special:
            raise InputError(
                f"the tokenizer has no special token {token!r}, which the chat format needs; use a plain prompt"
            )
        return self.special[token]

    def decode(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=True)


class TextStream:
    """Turns tokens into text as they come. It holds back bytes that are not a whole character yet."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.shown = tokenizer, ""
        self.ids: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        self.ids.append(token)
        return self._advance(self.tokenizer.decode(self.ids), final=False)

    def finish(self) -> str:
        """The text that was held back."""
        return self._advance(self.tokenizer.decode(self.ids), final=True)

    def _advance(self, text: str, final: bool) -> str:
        if not final:
            text = text.rstrip("\ufffd")  # the replacement character: bytes of a character still to come
        if not text.startswith(self.shown):
            return ""
        fresh, self.shown = text[len(self.shown) :], text
        return fresh
