"""Rewinds of GQA caches, plain and in pages, against rows that never held what was forgotten."""

import pytest

from tests.engine.conftest import paged, random_ids, same


@pytest.mark.parametrize("name", ["some windows", "dense, native"])
@pytest.mark.parametrize("kind", ["plain", "pages"])
def test_rows_go_back_and_on_with_other_tokens(models, kind, name):
    """Appends and rewinds of random lengths, within what pages behind a window still hold; slots of a plain cache are
    as many as tokens. Then the bits are those of a row that first ran the tokens that stayed."""
    model = models(name)
    ids = random_ids(model, 2, 200)
    others, back = (ids + 1) % model.config.vocab_size, 40
    new = lambda: model.new_cache(2, 200, back) if kind == "plain" else paged(model, 2, 200, max_rewind=back)
    cache, fresh = new(), new()
    for c in (cache, fresh):
        model.append(ids[:, :90], c)
    for wrong, forgotten in (((40, 1), (40, 1)), ((7, 30), (7, 30)), ((1, 1), (1, 0)), ((0, 3), (0, 4))):
        model.append(others[:, :40], cache, list(wrong))
        cache.rewind(list(forgotten))
    assert cache.lengths == [90, 90]
    assert same(*(model.append(ids[:, 90:99], c) for c in (cache, fresh)))
