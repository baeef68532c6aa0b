"""`dsv4 batch`: a file of requests against one checkpoint."""

from collections.abc import Callable
from pathlib import Path

from dsv4.chat import plain_ids
from dsv4.engine.batch import BatchEngine
from dsv4.engine.requests import Request, Result, read_requests
from dsv4.errors import InputError
from dsv4.memory import parse_count
from dsv4.paged_cache import new_paged_cache
from dsv4.run import Session
from dsv4.tokenizer import Tokenizer

PREFIXES = 8  # kept prefixes a row for which window and raw pages are set aside


def run_batch(session: Session, file: Path, rows: int, max_context: str | None, pool_tokens: str | None,
              together: bool, write: Callable[[dict], None]) -> int:
    """Run the requests of a file; `write` gets each result as a document as it ends, then {"figures": …}. Returns how many failed.

    max_context and pool_tokens as in `parse_count`; by default what the largest request needs, within the checkpoint's limit, and
    that times `rows`. Raises InputError for a file that cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError as error:
        raise InputError(f"cannot read requests from {file}: {error.strerror}") from None
    model, path = session.model, session.checkpoint
    tokenizer = Tokenizer(path, model.config.vocab_size) if (path / "tokenizer.json").is_file() else None

    def encode(text: str) -> list[int]:
        if tokenizer is None:
            raise InputError(f"{path} has no tokenizer.json; give token_ids")
        return plain_ids(tokenizer, text, model.config.bos_token_id)
    failed = 0

    def finish(result: Result) -> None:
        nonlocal failed
        failed += result.error is not None
        stopped = result.stop_reason == "eos"
        write(result.document(tokenizer.decode(result.token_ids[:-1] if stopped else result.token_ids) if tokenizer else None))
    found = list(read_requests(lines, encode))
    asked = [r for r in found if isinstance(r, Request)]
    limit = model.config.max_position_embeddings
    needed = max((n for r in asked if (n := len(r.prompt_ids) + r.max_tokens - 1) <= limit), default=1)
    context = min(needed, limit) if max_context is None else parse_count(max_context)
    cache = new_paged_cache(model, rows, context, None if pool_tokens is None else parse_count(pool_tokens), 0, PREFIXES * rows)
    engine = BatchEngine(model, cache, session.stop_ids, together, finish)
    for item in found:
        engine.submit(item) if isinstance(item, Request) else finish(item)
    engine.run()
    write({"figures": engine.figures()})
    return failed
