"""lm_eval's model `dsv4`.

Texts become tokens as in lm_eval's own adapter of transformers, with one difference: names of control tokens in a text
are control tokens only in a conversation that the chat template wrote. Of a request for a log-likelihood the context is
a prompt, and the continuation is decoded: a policy (`attention`, `terminate`) acts on the continuation, and
`prefill_chunks` on the context. A text of `loglikelihood_rolling` has no prompt: it is decoded where a policy acts on
decoding, and else read as a prompt is.
"""

import hashlib
import logging
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from dsv4 import __version__
from dsv4.commands.generate import Session, check_context, model_config
from dsv4.engine.state import Request
from dsv4.errors import InputError, brief
from dsv4.lm_eval.arguments import arguments_named, joined
from dsv4.lm_eval.generation import generated
from dsv4.lm_eval.scoring import scores
from dsv4.loaders.files import read_json
from dsv4.model import chat, families
from dsv4.model.tokenizer import Tokenizer
from dsv4.runtime.threads import limited_threads
from dsv4.sampling import Sampling

MAX_GEN_TOKS = 256  # as in lm_eval's adapter of transformers
KNOWN = ("until", "max_gen_toks", "do_sample", "temperature", "top_p")  # of a task's generation_kwargs
log = logging.getLogger("lm_eval.dsv4")


@register_model("dsv4")
class Dsv4LM(TemplateLM):
    """given: what `dsv4.lm_eval.arguments.Arguments` describes. Raises InputError, CheckpointError and others of
    dsv4.errors, each one line."""

    prefix_token_id = eot_token_id = -1  # set for each model; lm_eval's class has properties

    def __init__(self, **given):
        super().__init__()
        self.arguments = asked = arguments_named(given)
        path = Path(asked.checkpoint)
        config = model_config(path)
        check_context(config, asked.context)
        self.tokenizer = Tokenizer(path, config.vocab_size)
        self.prefix_token_id, self.eot_token_id = _begin_and_end(path, config, self.tokenizer)
        self.max_length = asked.context or config.max_position_embeddings
        self.session = Session(path, asked.choices, attention=asked.reads)
        self.model, self.family = self.session.model, families.of(config)
        self._device = self.model.device

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict, additional_config: dict | None = None) -> "Dsv4LM":
        """Raises InputError where a model argument contradicts an option of lm_eval's command line."""
        return cls(**joined(arg_dict, additional_config or {}))

    def get_model_info(self) -> dict:
        """What lm_eval writes beside the results."""
        return {"dsv4_version": __version__, "dsv4_arguments": asdict(self.arguments)}

    # ---- text and tokens -----------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """Part of the name of lm_eval's file of cached requests."""
        return str(Path(self.arguments.checkpoint).resolve()).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The one chat format that dsv4 writes, in words. Raises InputError for another, or without its tokens."""
        if isinstance(chat_template, str):
            raise InputError(
                f"--apply_chat_template {brief(chat_template)} was given; dsv4 has one chat format: leave out the name"
            )
        self.tokenizer.control(chat.BOS)
        return chat.__doc__ if chat_template else None

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
        """A conversation in DeepSeek's chat format, written out. Raises InputError as `chat_parts`, and for a tokenizer
        without the control tokens."""
        parts = chat.chat_parts(chat_history, resume=not add_generation_prompt)
        for text, is_control in parts:
            if is_control:
                self.tokenizer.control(text)
            elif found := [name for name in self.tokenizer.special if name in text]:
                log.warning("a message has %s in its text, which becomes that control token", found[0])
        return "".join(text for text, _ in parts)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Token ids as a prompt begins, or of a conversation; if add_special_tokens is False, of the text alone."""
        if add_special_tokens is False:
            return self.tokenizer.encode(string)
        if string.startswith(chat.BOS) and chat.BOS in self.tokenizer.special:
            return chat.written_ids(self.tokenizer, string)
        return self.family.prompt_ids(self.tokenizer, string, self.model.config) if string else []

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not context.strip():  # spaces belong to the continuation, which leaves an empty context
            return [self.prefix_token_id], self.tok_encode(context + continuation, add_special_tokens=False)
        return super()._encode_pair(context, continuation)

    # ---- requests ------------------------------------------------------------------------

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation in nats, whether greedy decoding would give it)."""
        if empty := [r.args[0] for r in requests if not r.args[1]]:
            raise InputError(f"the continuation of the context {brief(empty[0])!r} is empty; it needs one token")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        reads, pairs = self.model.attention, [(context, continuation) for _, context, continuation in requests]
        self._say_cut(sum(len(a) + len(b) > self.max_length + 1 for a, b in pairs), len(pairs))
        found = self._scores(pairs, reads is not None and not reads.plain, disable_tqdm)
        for (text, *_), answer in zip(requests, found):
            self.cache_hook.add_partial("loglikelihood", text, answer)
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts in nats, in windows as lm_eval cuts them."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                windows.append(make_disjoint_window(window))
                owners.append(number)
        reads = self.model.attention
        decoded = reads is not None and not (reads.policy.dense and reads.termination is None)
        sums = [0.0] * len(requests)
        for owner, (found, _) in zip(owners, self._scores(windows, decoded, disable_tqdm)):
            sums[owner] += found
        for request, found in zip(requests, sums):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found)
        return sums

    def _scores(self, pairs, decoded: bool, quiet: bool) -> list[tuple[float, bool]]:
        hidden, rows = self.model.config.hidden_size, self.arguments.batch_size
        with tqdm(total=len(pairs), desc="log-likelihoods", disable=quiet) as bar, limited_threads(hidden):
            return scores(self.model, pairs, self.max_length, rows, decoded, bar.update)

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to the first of its stop strings. Sampled tokens depend on lm_eval's seed of
        torch, the context, and how often that context came before; not on other requests."""
        seen, asked, cut = Counter(), [], 0
        for number, request in enumerate(requests):
            context, how = request.args[0], _generation(request.args[1])
            ids, new = self.tok_encode(context) or [self.prefix_token_id], how["max_gen_toks"]
            if not 0 < new < self.max_length:
                raise InputError(
                    f"max_gen_toks is {new}; expected 1 to {self.max_length - 1}, so that a prompt has room in the "
                    f"context of {self.max_length} tokens"
                )
            sampling = Sampling(how["temperature"], how["top_p"], _seed(context, seen[context]))
            prompt = tuple(ids[new - self.max_length :])
            seen[context], cut = seen[context] + 1, cut + (len(prompt) < len(ids))
            asked.append((Request(str(number), prompt, new, sampling=sampling), [s for s in how["until"] if s]))
        self._say_cut(cut, len(asked))
        texts, given = [""] * len(asked), (self.arguments.batch_size, self.arguments.together)
        hidden = self.model.config.hidden_size
        with tqdm(total=len(asked), desc="texts", disable=disable_tqdm) as bar, limited_threads(hidden):
            for name, ids in generated(self.session, self.tokenizer, asked, *given):
                text = postprocess_generated_text(self.tokenizer.decode(ids), asked[int(name)][1], None)
                texts[int(name)] = text
                self.cache_hook.add_partial("generate_until", requests[int(name)].args, text)
                bar.update()
        return texts

    def _say_cut(self, cut: int, of: int) -> None:
        if cut:
            room = self.max_length
            log.warning("%d of %d requests lost their first tokens, for a context of %d tokens", cut, of, room)


def _generation(given: dict) -> dict:
    """max_gen_toks, until, temperature and top_p of a task's generation_kwargs, by lm_eval's own rules. Raises
    InputError for what the engine does not have."""
    how = dict(normalize_gen_kwargs(given, MAX_GEN_TOKS))
    unknown = [name for name in how if name not in KNOWN and (name, how[name]) != ("num_beams", 1)]
    if unknown:
        raise InputError(f"generation argument {brief(unknown[0])!r} is unknown; expected {', '.join(KNOWN)}")
    return {"temperature": 0.0, "top_p": 1.0} | how


def _seed(context: str, nth: int) -> int:
    digest = hashlib.sha256(f"{torch.initial_seed()} {nth} {context}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _begin_and_end(path: Path, config, tokenizer: Tokenizer) -> tuple[int, int]:
    """The token before a text without a context, and the one that ends a text: begin of text and end of text as
    tokenizer_config.json names them, else as config.json. Without a begin of text the end of text comes before. Raises
    InputError without both."""
    file = path / "tokenizer_config.json"
    named = read_json(file) if file.is_file() else {}
    words = [named.get(key) for key in ("bos_token", "eos_token")]
    words = [word["content"] if isinstance(word, dict) else word for word in words]
    begin, end = (None if word is None else tokenizer.backend.token_to_id(word) for word in words)
    end = next(iter(config.eos_token_id), None) if end is None else end
    if begin is None and not named:
        begin = config.bos_token_id
    begin = end if begin is None else begin
    if begin is None:
        raise InputError(f"{path} names no begin or end of text, which comes before a text without a context")
    return begin, begin if end is None else end
