"""`dsv4 batch`: a file of requests against one checkpoint."""

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dsv4.cache.paged import PagedCache, new_paged_cache
from dsv4.cache.paging import BLOCK, PRESSURE_PERCENT, pool_pages
from dsv4.commands.generate import (
    Session,
    drafts_asked,
    make_drafter,
    model_config,
    speculation_notes,
    termination_notes,
)
from dsv4.engine.batch import REWIND, BatchEngine
from dsv4.engine.device_batch import DeviceBatch
from dsv4.engine.engine import Engine
from dsv4.engine.expert_use import ExpertUse
from dsv4.engine.report import check_can_report, document, request_document, write_report
from dsv4.engine.requests import read_requests
from dsv4.engine.state import Request, Result, percentiles
from dsv4.engine.steppers import rounds_in
from dsv4.errors import InputError
from dsv4.model import families
from dsv4.model.causal import CausalLM, capacity
from dsv4.model.gqa.choice import Attention
from dsv4.model.tokenizer import Tokenizer

# the command line, of which this is a part, may import the probes; the modules below it may not
from dsv4.probes.report import provenance
from dsv4.runtime import user_kernels
from dsv4.speculation.choice import policy_named
from dsv4.speculation.one_launch import check_loop
from dsv4.speculation.policy import Policy, Static
from dsv4.units import count_named

STDIN = Path("-")
PREFIXES = 8  # kept prefixes a row for which window and raw pages are reserved


@dataclass(frozen=True)
class Options:
    """Options of a batch run. max_context and pool_tokens as in `parse_count`; by default the need of the largest
    request, within the checkpoint's limit, and that times `rows`. speculate: 'off', 'mtp' or 'lookup'. draft_tokens and
    draft_costs as `policy_named` takes them, None: the default. loop: 'host', or 'device' (`DeviceBatch`, whose rows
    run together). report: directory of the report, if wanted. Raises InputError for invalid options."""

    rows: int = 8
    max_context: str | None = None
    pool_tokens: str | None = None
    together: bool = False
    speculate: str = "off"
    draft_tokens: str | None = None
    draft_costs: Path | None = None
    loop: str = "host"
    report: Path | None = None

    def __post_init__(self):
        if self.speculate == "off" and (self.draft_tokens is not None or self.draft_costs is not None):
            raise InputError(
                "--draft-tokens or --draft-costs was given and nothing is drafted; add --speculate mtp or "
                "--speculate lookup"
            )
        self.context, self.tokens, self.policy  # each is read only once, because a file of costs may be a pipe

    @cached_property
    def context(self) -> int | None:
        return None if self.max_context is None else count_named("--max-context", self.max_context)

    @cached_property
    def tokens(self) -> int | None:
        return None if self.pool_tokens is None else count_named("--pool-tokens", self.pool_tokens)

    @cached_property
    def policy(self) -> Policy | None:
        """The drafting policy; None if nothing drafts. Rows that run alone share a pass with no other row."""
        if self.speculate == "off":
            return None
        return policy_named(
            drafts_asked(self.draft_tokens, self.speculate), self.draft_costs, self.rows if self.batched else 1
        )

    @property
    def batched(self) -> bool:
        """Whether rows share passes."""
        return self.together or self.loop == "device"

    @property
    def engine(self) -> dict:
        """The engine's arguments for speculation."""
        if self.speculate == "off":
            return {}
        return {"drafter": make_drafter(self.speculate), "policy": self.policy}


def run_batch(
    load: Callable[[list[Request]], Session],
    checkpoint: Path,
    file: Path,
    options: Options,
    write: Callable[[dict], None],
) -> int:
    """Run the requests of a file, or of standard input ("-"); `write` gets each result as a document as it ends, then
    {"figures": …}. load: loads the checkpoint, for these requests. Returns how many failed.

    Raises InputError for a file that cannot be read or holds no request, and a report that cannot be written, before
    `load` is called, and for a drafter that the model cannot run.
    """
    lines, started = _read(file), time.time()
    if not any(line.strip() for line in lines):
        raise InputError(
            f"{'standard input' if file == STDIN else file} holds no requests; expected one JSON object a line: "
            '{"prompt": "Hello", "max_tokens": 16}'
        )
    if options.report is not None:
        check_can_report(options.report)
    tokenizer, encode = _encoder(checkpoint)
    found, documents = list(read_requests(lines, encode, options.speculate)), []
    asked = [r for r in found if isinstance(r, Request)]
    session = load(asked)

    def finish(result: Result) -> None:
        stopped = result.stop_reason == "eos"
        text = tokenizer.decode(result.token_ids[:-1] if stopped else result.token_ids) if tokenizer else None
        documents.append(request_document(result, text))
        write(documents[-1])

    if options.batched and session.model.expert_tier is not None:
        session.model.expert_tier.check(options.rows)
    use = ExpertUse(session.model)
    engine = new_engine(session.model, asked, options, session.stop_ids, finish)
    for item in found:
        engine.submit(item) if isinstance(item, Request) else finish(item)
    use.mark()
    begun = time.perf_counter()
    engine.run()
    seconds = time.perf_counter() - begun
    use.mark()
    session.model.ranks.check()
    notes = [] if options.speculate == "off" else speculation_notes(session.model, options.together)
    firsts = [s for d in documents if (s := d["time_to_first_token_seconds"]) is not None]
    figures = engine.figures() | {"time_to_first_token_seconds": percentiles(firsts)}
    figures |= {"notes": termination_notes(session.model) + notes}
    if experts := use.document(sum(len(d["token_ids"]) for d in documents), seconds):
        figures["experts"] = experts
    if pinned := session.model.embed.host_bytes:
        figures["embedding"] = {"pinned_bytes": pinned}
    if session.model.replacements:
        figures["kernels"] = user_kernels.documents(session.model)
    write({"figures": figures})
    if options.report is not None:
        name = "stdin" if file == STDIN else file.stem
        write_report(
            options.report,
            name,
            document(_about(session, file, options, figures["notes"], started), figures, documents),
        )
    return sum(d["error"] is not None for d in documents)


def _read(file: Path) -> list[str]:
    """Lines of the file; "-" is standard input. Bytes that are not UTF-8 are kept for the error of their line; a byte
    order mark is dropped."""
    if file == STDIN and sys.stdin is None:
        raise InputError(
            "cannot read requests from standard input: it is closed; pipe requests into it, or name a file"
        )
    try:
        held = sys.stdin.buffer.read() if file == STDIN else file.read_bytes()
        return held.decode("utf-8-sig", "surrogateescape").split("\n")
    except OSError as error:
        raise InputError(
            f"cannot read requests from {'standard input' if file == STDIN else file}: {error.strerror or error}; "
            "name a file that can be read, or pipe them in"
        ) from None


def _encoder(path: Path) -> tuple[Tokenizer | None, Callable[[str], list[int]]]:
    """The tokenizer of a checkpoint directory, None without a tokenizer.json, and what encodes a prompt."""
    config = model_config(path)
    tokenizer = Tokenizer(path, config.vocab_size) if (path / "tokenizer.json").is_file() else None

    def encode(text: str) -> list[int]:
        if tokenizer is None:
            raise InputError(f"{path} has no tokenizer.json; give token_ids")
        if not text:
            raise InputError("the prompt is empty; give it text, or token_ids")
        return families.of(config).prompt_ids(tokenizer, text, config)

    return tokenizer, encode


def new_engine(model: CausalLM, asked: Sequence[Request], options: Options, stop_ids, on_result) -> Engine:
    """The engine that the options ask for, with room for the requests. Raises ConditionalError where a loop was to run
    on the device and cannot."""
    if options.loop == "host":
        cache = new_pool(model, asked, options)
        return BatchEngine(model, cache, stop_ids, options.together, on_result, **options.engine)
    check_loop(model)
    if model.attention is not None and model.attention.prefill is not None:
        raise InputError(
            "--prefill-chunks and --loop device were given; prompts of a group are read densely before its launch: "
            "leave one of them out"
        )
    context, policy = context_of(model, asked, options), options.policy or Static(0)
    most, rewind = rounds_in(model.config, context, options.engine.get("drafter"), policy)
    cache = _pool(model, options, context + most + 1, rewind, prefixes=0)
    return DeviceBatch(model, cache, most, stop_ids, on_result, **options.engine)


def new_pool(model: CausalLM, asked: Sequence[Request], options: Options) -> PagedCache:
    """A cache of `options.rows` rows, with the context and pages that the options state or else the requests need."""
    rewind = 0 if options.speculate == "off" else REWIND
    return _pool(model, options, context_of(model, asked, options), rewind, PREFIXES * options.rows)


def context_of(model: CausalLM, asked: Sequence[Request], options: Options) -> int:
    """Tokens of a row: as the options state, or as the largest request needs."""
    limit = model.config.max_position_embeddings
    needed = max((n for r in asked if (n := len(r.prompt_ids) + r.max_tokens - 1) <= limit), default=1)
    return min(needed, limit) if options.context is None else options.context


def _pool(model: CausalLM, options: Options, context: int, rewind: int, prefixes: int) -> PagedCache:
    """prefixes: kept ones for which window and raw pages are reserved."""
    pages = _pages(model, options.rows, capacity(model, context), options.tokens, rewind, prefixes)
    return new_paged_cache(model, options.rows, context, max_rewind=rewind, pages=pages)


def _pages(model: CausalLM, rows: int, context: int, tokens: int | None, rewind: int, kept: int) -> dict[str, int]:
    """Pages of each pool. A pool gets more than `tokens` need if that many alone would be under pressure. Without a
    requested number of tokens every row can be full. Otherwise a pool has at least one page a row, which the row holds
    from its first entry on, and the pages of windows that rows hold."""
    groups, wanted = model.page_layout().groups, rows * context if tokens is None else tokens
    chunked = model.attention is not None and model.attention.prefill is not None
    piece = model.chunk if chunked else BLOCK  # tokens of a prompt in one step of the engine
    pages, running = (pool_pages(groups, rows, wanted, rewind, piece, prefixes, context) for prefixes in (kept, 0))
    for name, group in groups.items():
        held = running[name]
        if group.back is None:
            held = rows * (-(-context // (group.rows * group.tokens)) if tokens is None else 1)
        pages[name] = max(pages[name], -(-held * 100 // PRESSURE_PERCENT))
    return pages


def _about(session: Session, file: Path, options: Options, notes: list[str], started: float) -> dict:
    """What a reader needs to know about the origin of the figures, and the command that obtains them again; paths are
    without their directories.

    started: time.time() at the start.
    """
    model, drafts = session.model, options.speculate != "off"
    return {
        "requests": file.name,
        "checkpoint": session.checkpoint.resolve().name,
        "numerics": model.numerics.name,
        "backend": model.backend,
        "device": provenance.device(model.device),
        **({"kernels": _kernels(model)} if model.replacements else {}),
        **({"ranks": model.ranks.words} if model.ranks.words else {}),
        "rows": options.rows,
        "rows run": "together" if options.batched else "alone",
        **({} if options.loop == "host" else {"loop": "on the device, one launch a group of requests"}),
        "speculate": options.speculate,
        "draft tokens": drafts_asked(options.draft_tokens, options.speculate) if drafts else "none",
        **({} if options.draft_costs is None else {"draft costs": options.draft_costs.name}),
        **({} if model.attention is None else {"attention": _attention(model.attention)}),
        "notes": notes,
        **provenance.commit(),
        "versions": provenance.versions(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "command": shlex.join(provenance.without_paths(part) for part in provenance.called(sys.argv)),
    }


def _kernels(model: CausalLM) -> str:
    """The user's kernels, in words."""
    return ", ".join(f"{a.operation} by {a.kernel} (sha256 {a.sha256})" for a in user_kernels.accounts(model))


def _attention(reading: Attention) -> str:
    """What decoding reads, and how prompts are read, in words."""
    kept = "" if reading.policy.dense else f" of {reading.policy.size}"
    stops, c = reading.termination, reading.prefill
    until = "" if stops is None else f", until stable (tau={stops.tau:g}, phi={stops.phi:g}, patience={stops.patience})"
    rule = "" if c is None or not c.rule else f", {c.rule}"
    prompts = "" if c is None else f"; prompts in chunks of {c.chunk} beside {c.local} + {c.heavy}{rule}"
    return f"{reading.policy.name}{kept}{until}{prompts}"
