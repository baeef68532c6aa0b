"""The catalogue of faults: every number has a sentence, every plant a number, and the page is what the code says."""

from dsv4.probes.kernel_audit.faults import FAULTS, NOT_PLANTED
from dsv4.probes.kernel_audit.plants import plants
from scripts.kernel_faults import PAGE, page


def test_every_fault_has_a_sentence_and_is_planted_or_says_why_not():
    planted = {p.entry for p in plants()}
    assert list(FAULTS) == list(range(1, len(FAULTS) + 1))
    assert planted <= set(FAULTS)
    assert set(NOT_PLANTED) == set(FAULTS) - planted
    for sentence in (*FAULTS.values(), *NOT_PLANTED.values()):
        assert sentence[:1].isupper() and sentence.endswith("."), sentence


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text() == page(), "run: python -m scripts.kernel_faults"
