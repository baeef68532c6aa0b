"""One request to one checkpoint, from prompt text to the document that describes what happened."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.commands.options import joined
from dsv4.engine.generate import Generation, context_needed, generate, generate_on_device, generate_speculative
from dsv4.engine.steppers import rounds_in
from dsv4.errors import ContextOverrun, InputError, brief
from dsv4.kernels.replacing import Replacement
from dsv4.loaders.files import read_json
from dsv4.loaders.load import Inventory
from dsv4.model import families
from dsv4.model.causal import CausalLM, captures
from dsv4.model.chat import chat_ids
from dsv4.model.config import ModelConfig
from dsv4.model.dummy import load_dummy
from dsv4.model.expert_memory import ExpertMemory
from dsv4.model.gqa.choice import Attention
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.load import load_model
from dsv4.model.tokenizer import TextStream, Tokenizer
from dsv4.runtime import user_kernels
from dsv4.runtime.launches import Work
from dsv4.runtime.memory import peak_bytes
from dsv4.sampling import Sampling
from dsv4.speculation.choice import policy_named
from dsv4.speculation.draft import Drafter, LookupDrafter, MTPDrafter
from dsv4.speculation.one_launch import OneLaunch, check_loop
from dsv4.speculation.one_launch import check_device as check_device
from dsv4.speculation.passes import Append
from dsv4.speculation.policy import Policy
from dsv4.speculation.verify import HOST, default
from dsv4.units import count_named


@dataclass(frozen=True)
class Request:
    """What the user asked for. `prompt` is text, or comma-separated ids when `is_ids`. Raises InputError for invalid
    options, before a checkpoint is loaded."""

    prompt: str
    is_ids: bool = False
    chat: bool = False
    think: bool = False
    system: str | None = None
    max_new_tokens: int = 128
    max_context: str | None = None
    sampling: Sampling = Sampling()
    random_tokens: int | None = None  # a prompt of so many random ids instead
    speculate: str = "off"  # or the drafter: 'mtp' or 'lookup'
    draft_tokens: str | None = None  # drafts of a verify pass, as `policy_named` takes them; None: the drafter's own
    draft_costs: Path | None = None  # costs of passes, for a policy that needs them
    # drafts are verified as one append, even if that rounds differently from plain decoding; captured steps need no
    # choice
    together: bool = False
    loop: str = "host"  # or 'device': a response is one launch

    def __post_init__(self):
        self.ids, self.context, self.policy  # each is read only once, because a file of costs may be a pipe

    @cached_property
    def ids(self) -> list[int] | None:
        """Ids of the prompt, if it is given as token ids."""
        try:
            return [int(part) for part in self.prompt.split(",")] if self.is_ids else None
        except ValueError:
            raise InputError(f"--token-ids is {brief(self.prompt)!r}; expected numbers separated by commas") from None

    @cached_property
    def context(self) -> int | None:
        return None if self.max_context is None else count_named("--max-context", self.max_context)

    @cached_property
    def policy(self) -> Policy | None:
        """The drafting policy, if it drafts."""
        return (
            None
            if self.speculate == "off"
            else policy_named(drafts_asked(self.draft_tokens, self.speculate), self.draft_costs)
        )


def read_prompt(text: str | None, file: Path | None, ids: str | None, random_tokens: int | None = None) -> str:
    """The prompt from exactly one place: --prompt, --prompt-file, --token-ids, --prompt-tokens, or standard input if it
    is piped."""
    options = (("--prompt", text), ("--prompt-file", file), ("--token-ids", ids), ("--prompt-tokens", random_tokens))
    given = [name for name, value in options if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} were given; the prompt comes from one of them")
    if random_tokens is not None:
        return ""
    if text is not None or ids is not None:
        found = text if text is not None else ids
    elif file is not None and str(file) != "-":
        try:
            found = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"cannot read the prompt from {file}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
            ) from None
    elif sys.stdin is None or sys.stdin.isatty() and file is None:  # None means that it is closed
        raise InputError("there is no prompt; pass --prompt TEXT, --prompt-file FILE, or text on standard input")
    else:
        try:
            found = sys.stdin.read()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                "cannot read the prompt from standard input: "
                f"{getattr(error, 'strerror', None) or 'it is not UTF-8 text'}; pass --prompt TEXT or --prompt-file "
                "FILE"
            ) from None
    if not found.strip():
        raise InputError("the prompt is empty; pass --prompt TEXT, --prompt-file FILE, or text on standard input")
    return found


def parse_max_memory(text: str | None) -> dict | None:
    """'cpu=4GiB,0=70GiB' → {'cpu': bytes, 0: bytes}."""
    if text is None:
        return None
    limits = {}
    for part in text.split(","):
        device, equals, size = part.partition("=")
        device = device.strip().removeprefix("cuda:")
        name = int(device) if device.isdecimal() else device
        if not equals or name in limits or not (device.isdecimal() or device == "cpu"):
            raise InputError(
                f"--max-memory has {brief(part)!r}; expected cpu and numbers of GPUs, each at most once, e.g. "
                "cpu=4GiB,0=70GiB"
            )
        limits[name] = count_named("--max-memory", size)
    return limits


@dataclass(frozen=True)
class Choices:
    """How a model is held and run: see `load_model`."""

    numerics: str = "native"
    backend: str = "auto"
    device: str = "cpu"
    cache: str = "auto"
    index_cache: str = "auto"


class Session:
    """A loaded checkpoint with its tokenizer (None without a tokenizer.json) and stop ids; or, without a checkpoint,
    the first `layers` layers of a published configuration (`dummy`) with random weights."""

    def __init__(
        self,
        checkpoint: Path | Inventory | None,
        choices: Choices = Choices(),
        device_map: str | None = None,
        max_memory: str | None = None,
        progress=None,
        dummy: str | None = None,
        layers: int | None = None,
        attention: Attention | None = None,
        kv_memory: HostMemory | None = None,
        kernels: Mapping[str, Replacement] | None = None,
        by_expert: bool = False,
        expert_memory: ExpertMemory | None = None,
        embedding_memory: str = "device",
    ):
        """by_expert: of several ranks each has whole routed experts."""
        choices = replace(choices, device=joined(choices.device, by_expert))
        if device_map not in (None, "auto"):
            raise InputError(f"device map {device_map!r} is unknown; expected 'auto'")
        self.first: float | None = None  # seconds from the last request to its first token, None if none was shown
        self.loop = "host"  # of the last request
        self.together = False  # whether the last passes were verified as one append
        if (checkpoint is None) == (dummy is None):
            raise InputError("a checkpoint directory or --dummy-weights is needed, and not both")
        if layers is not None and dummy is None:
            raise InputError("--layers belongs to --dummy-weights; a checkpoint runs whole")
        if dummy is not None:
            self.model = load_dummy(
                dummy,
                layers,
                attention=attention,
                kv_memory=kv_memory,
                kernels=kernels,
                progress=progress,
                expert_memory=expert_memory,
                embedding_memory=embedding_memory,
                **asdict(choices),
            )
            self.checkpoint, self.tokenizer, self.stop_ids = Path(f"{dummy} geometry, random weights"), None, set()
            return
        self.model = load_model(
            checkpoint,
            progress=progress,
            device_map=device_map,
            max_memory=parse_max_memory(max_memory),
            attention=attention,
            kv_memory=kv_memory,
            kernels=kernels,
            expert_memory=expert_memory,
            embedding_memory=embedding_memory,
            **asdict(choices),
        )
        self.checkpoint = self.model.inventory.path
        self.tokenizer: Tokenizer | None = None
        self.stop_ids = set(self.model.config.eos_token_id)
        if (self.checkpoint / "generation_config.json").is_file():
            eos = read_json(self.checkpoint / "generation_config.json").get("eos_token_id", [])
            self.stop_ids |= set(eos if isinstance(eos, list) else [eos])

    def encode(self, request: Request) -> list[int]:
        """Token ids of the request's prompt."""
        self.tokenizer, ids = encode(self.checkpoint, self.model.config, request)
        return ids

    def generate(
        self, ids: list[int], request: Request, show: Callable[[str], None], on_prefill=None
    ) -> tuple[Generation, str]:
        """Run the request; `show` gets text as it completes. Returns (result, whole text)."""
        stream = TextStream(self.tokenizer) if self.tokenizer else None

        shown, begun, self.first = [], time.perf_counter(), None

        def on_token(token: int) -> None:
            if not shown:
                self.first = time.perf_counter() - begun
            shown.append(token)
            show(stream.push(token) if stream else f"{token} ")

        try:
            result = self._run(ids, request, request.context, on_token, on_prefill)
        except ContextOverrun:
            if shown:  # the generated text stays; the error comes on a line of its own
                show((stream.finish() if stream else "") + "\n")
            raise
        self.model.ranks.check()
        if stream:
            show(stream.finish())
        return result, stream.shown if stream else ""

    def _run(self, ids: list[int], request: Request, context: int | None, on_token, on_prefill) -> Generation:
        """One row, with drafts or without."""
        self.loop = request.loop
        if request.loop == "device":
            check_loop(self.model)
        elif request.speculate == "off":
            return generate(
                self.model, ids, request.max_new_tokens, request.sampling, context, self.stop_ids, on_token, on_prefill
            )
        rounds = captures(self.model)
        # a round verifies all drafts in one step, with the text of plain decoding
        self.together = request.together and not rounds
        run = generate_on_device if rounds else generate_speculative
        how = {} if rounds else {"verify": Append if self.together else default}
        how |= {"make": OneLaunch} if request.loop == "device" else {}
        return run(
            self.model,
            [ids],
            request.max_new_tokens,
            None if request.speculate == "off" else make_drafter(request.speculate),
            request.sampling,
            request.policy,
            context,
            self.stop_ids,
            lambda row, token: on_token(token),
            on_prefill,
            **how,
        )[0]

    def _notes(self, result: Generation) -> list[str]:
        """Notes that a reader of this result needs."""
        return (
            [f"{said}." for said in [self.model.ranks.words] if said]
            + termination_notes(self.model)
            + ([] if result.speculation is None else speculation_notes(self.model, self.together))
        )

    def document(self, result: Generation, text: str) -> dict:
        """Everything that is reported of a generation, as JSON values. Times in seconds, sizes in bytes."""
        model = self.model
        return {
            "text": text,
            "token_ids": result.token_ids,
            "prompt_token_ids": result.prompt_ids,
            "stop_reason": result.stop_reason,
            "checkpoint": str(self.checkpoint),
            "layout": model.inventory.layout.name if model.inventory else "none",
            "numerics": model.numerics.name,
            "backend": model.backend,
            "device": str(model.device),
            "loop": self.loop,
            "timings": {
                "prefill_seconds": result.prefill_seconds,
                "prefill_tokens_per_second": result.prefill_rate,
                "decode_seconds": result.decode_seconds,
                "decode_tokens_per_second": result.decode_rate,
                "capture_seconds": result.capture_seconds,
                "time_to_first_token_seconds": self.first,
            },
            "bytes": {
                "weights": model.nbytes,
                "cache": result.cache_bytes,
                "peak": peak_bytes(model.device),
                "max_context": result.max_context,
            },
            "host_memory": result.host,
            **({"experts": result.experts} if result.experts else {}),
            **({"embedding": {"pinned_bytes": model.embed.host_bytes}} if model.embed.host_bytes else {}),
            "speculation": result.speculation.document(len(result.token_ids)) if result.speculation else None,
            "attention": model.attention.document() if model.attention else None,
            "placement": model.placement,
            "layers": model.layer_paths(),
            "dispatch": model.dispatch.rows(),
            **({"kernels": user_kernels.documents(model)} if model.replacements else {}),
            **({"ranks": model.ranks.words} if model.ranks.words else {}),
            "load": model.ledger.totals() if model.ledger else None,
            "notes": (model.ledger.notes if model.ledger else []) + self._notes(result),
        }


def model_config(checkpoint: Path) -> ModelConfig | GQAConfig:
    """The config of a checkpoint directory, whose shards are found to be there; no weights are read. Raises
    CheckpointError and ConfigError."""
    return config_of(Inventory.open(checkpoint))


def config_of(inventory: Inventory) -> ModelConfig | GQAConfig:
    """The config of a checkpoint that was opened. Raises ConfigError."""
    return families.of(inventory).read_config(inventory.config)


def prepare(inventory: Inventory, request: Request) -> tuple[ModelConfig | GQAConfig, Tokenizer | None, list[int]]:
    """Config, tokenizer and prompt of a request. A request that cannot run is refused here, before the weights are
    read. Raises as `config_of`, `encode` and `dsv4.engine.generate.context_needed` do."""
    config = config_of(inventory)
    tokenizer, ids = encode(inventory.path, config, request)
    check_context(config, request.context)
    context_needed(config, [ids], request.max_new_tokens, request.context)
    return config, tokenizer, ids


def work_of(config: ModelConfig | GQAConfig, prompt: int, context: int, request: Request, batch: int = 1) -> Work:
    """What a request with a prompt of so many tokens makes a model on a GPU do. Raises InputError as `rounds_in`."""
    if request.speculate == "off":
        return Work(prompt, context, batch)
    _, rewind = rounds_in(config, context, make_drafter(request.speculate), request.policy)
    return Work(prompt, context, batch, request.policy.sizes, rewind)


def check_context(config: ModelConfig | GQAConfig, context: int | None) -> None:
    """Raises InputError for more tokens of context than the checkpoint takes."""
    most = config.max_position_embeddings
    if context is not None and context > most:
        raise InputError(
            f"--max-context {context} exceeds the checkpoint's max_position_embeddings {most}; ask for at most that"
        )


def encode(checkpoint: Path, config: ModelConfig | GQAConfig, request: Request) -> tuple[Tokenizer | None, list[int]]:
    """The checkpoint's tokenizer, None without a tokenizer.json, and the token ids of the request's prompt."""
    wordless, vocab = request.is_ids or request.random_tokens, config.vocab_size
    tokenizer = Tokenizer(checkpoint, vocab) if not wordless or (checkpoint / "tokenizer.json").is_file() else None
    if request.random_tokens:
        g = torch.Generator().manual_seed(request.sampling.seed)
        return tokenizer, torch.randint(vocab, (request.random_tokens,), generator=g).tolist()
    if request.is_ids:
        return tokenizer, request.ids
    if request.chat:
        system = [] if request.system is None else [{"role": "system", "content": request.system}]
        messages = [*system, {"role": "user", "content": request.prompt}]
        return tokenizer, chat_ids(tokenizer, messages, request.think)
    return tokenizer, families.of(config).prompt_ids(tokenizer, request.prompt, config)


def speculation_notes(model: CausalLM, together: bool = False) -> list[str]:
    """Notes on a text that was speculated in the model's numerics. together: passes, or rows, were one append."""
    if model.numerics.name == "fp32" or (model.backend in HOST or captures(model)) and not together:
        return []
    return [
        f"on the {model.backend} backend numerics {model.numerics.name} may round a pass of several tokens otherwise "
        "than single steps: where two tokens are close, the text may leave that of plain decoding "
        "(dsv4/speculation/README.md)"
    ]


def termination_notes(model: CausalLM) -> list[str]:
    """A note if a rule to stop reading could leave nothing out in the last step, because there were too few tiles.
    Waits for the device."""
    rule, found = model.attention and model.attention.termination, {}
    for row in model.layer_paths() if rule else ():
        if row.get("tiles_each", rule.useful) < rule.useful:
            found.setdefault(tuple(row[key] for key in ("tiles_each", "batch", "of_tiles", "traversals")), []).append(
                row
            )
    return [
        f"--terminate: {each} tile{'s' if each > 1 else ''} a split at batch {batch} ({of} of {rule.tile} tokens in "
        f"{splits} split{'s' if splits > 1 else ''}): nothing can stop; a split can leave tiles out if it has "
        f"{rule.useful} or more"
        for each, batch, of, splits in found
    ]


def make_drafter(name: str) -> Drafter:
    """The drafter called 'mtp' or 'lookup'. Raises InputError for another name."""
    drafters = {"mtp": MTPDrafter, "lookup": LookupDrafter}
    if name not in drafters:
        raise InputError(f"--speculate {name!r} is unknown; expected off, {' or '.join(drafters)}")
    return drafters[name]()


def drafts_asked(draft_tokens: str | None, drafter: str) -> str:
    """Drafts as `policy_named` takes them; None means the drafter's default. Raises as `make_drafter` does."""
    return draft_tokens or str(make_drafter(drafter).draft_tokens)
