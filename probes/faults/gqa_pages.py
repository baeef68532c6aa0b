"""Section 1.12, GQA models: tiles of keys, values and summaries in pages, and prefixes that requests borrow."""

from dsv4.cache.page_tables import PageTable
from dsv4.cache.paged import PagedCache
from dsv4.model.gqa.paged import PagedRows
from dsv4.probes.faults import Site, mutation
from dsv4.probes.faults.grafting import after_graft, not_carried, own_copies


@mutation("1.12", bugs=(), parts=("copy on write, pages of the donor",), probes=("grafting",), profile="qwen2")
def tokens_written_through_the_first_rows_table(site: Site) -> None:
    """A step reads its own row's tiles and writes its tokens through the table of row 0: another request's pages."""

    def index(table, step, rows):
        flat = rows.flatten(1)
        return (table.physical[: step.B].gather(1, flat // table.R) * table.R + flat % table.R).view(rows.shape)

    site.patch(PageTable, "index", index)


@mutation(
    "1.12", bugs=(), parts=("graft, lows of blocks", "graft, highs of blocks"), probes=("grafting",), profile="llama3"
)
def summaries_of_a_step_stay_in_its_copy(site: Site) -> None:
    """Keys and values of a step are written back to their pages and the summaries of its blocks are not: a policy
    searches old bounds."""
    site.patch(PagedRows, "summarised", lambda rows, step, summaries: None)


@mutation("1.12", bugs=(130,), parts=("graft, lows of blocks",), probes=("grafting",), profile="qwen2")
def summaries_not_carried_by_a_graft(site: Site) -> None:
    """A graft takes the keys and values of a prefix without the lows of its blocks: bounds of the prefix are of
    nothing."""
    after_graft(site, lambda cache, b, snapshot: own_copies(cache, b, "tokens", "low"))


@mutation("1.12", bugs=(130,), parts=("graft, keys", "graft, values"), probes=("grafting",), profile="yarn")
def window_pages_not_carried_by_a_graft(site: Site) -> None:
    """A graft shares the pages of layers that attend to everything: those with a window begin with none."""
    not_carried(site, "window")


@mutation(
    "1.12", bugs=(134,), parts=("copy on write, pages of the kept prefix",), probes=("grafting",), profile="mistral"
)
def copy_on_write_is_left_out_for_windows(site: Site) -> None:
    """Pages of windows, which go back soon, are written in place whoever holds them: a donor that goes back writes the
    kept prefix."""
    real = site.patch(
        PagedCache,
        "_take",
        lambda cache, name, b, logical, old: real(cache, name, b, logical, old) if not old else None,
    )
