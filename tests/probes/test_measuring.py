"""What the measuring commands refuse, each in one line, and the checks of settings that they share."""

import pytest

from dsv4.errors import InputError
from dsv4.probes.measure.base.settings import ascending, check_least, check_range
from tests.dsv4.test_cli import demo  # noqa: F401  (fixture: a DeepSeek-V4 checkpoint with a tokenizer)
from tests.fidelity.conftest import csa_path, gqa_path, run  # noqa: F401  (fixtures)

REFUSED = {  # (command, checkpoint) → (options, what is said of them)
    ("recall --needles 0", "demo"): (
        ("--context 5000", "exceeds the 4096 tokens"),
        ("--context a", "a"),
        ("--context 192,,200", "separated by commas"),
        ("--k 0", "0"),
        ("--text nowhere.txt", "nowhere.txt"),
        ("--subject files", "expected ours or transformers"),
        ("--dump nowhere", "no dump"),
        ("--subject transformers --numerics qat", "--numerics would change nothing"),
    ),
    ("fidelity", "demo"): (
        ("--context 5000", "expected 2 … 3968 tokens"),
        ("--context 1", "--context 1: expected 2"),
        ("--effort great", "--effort takes quick"),
        ("--context 200 --tail 200", "leaves no prompt"),
        ("--policy block-bound", "--policy would change nothing of a DeepSeek-V4"),
        ("--budget 64 --block 16", "--budget, --block would change nothing"),
        ("--topk 0", "--topk 0; expected at least 1"),
        ("--topk 2,,3", "separated by commas"),
        ("--rows 0", "--rows 0"),
        ("--text nowhere.txt", "nowhere.txt"),
        ("--numerics int8", "int8"),
    ),
    ("fidelity", "gqa_path"): (
        ("--topk 4", "--topk would change nothing of a GQA"),
        ("--policy quest", "expected some of dense, sink-window"),
        ("--policy dense", "the dense policy alone"),
        ("--policy a,,b", "separated by commas"),
        ("--budget 128", "--budget 128 is too little"),
    ),
    ("termination", "gqa_path"): (
        ("--context 5000", "expected 2 … "),
        ("--rows 0", "--rows 0"),
        ("--looser a", "such as 1e-3,1e-2"),
        ("--looser -1", "expected positive τ"),
        ("--tile 100", "a multiple of 64"),
        ("--tau -1", "tau is -1"),
        ("--patience 0", "patience is 0"),
        ("--policy quest", "is unknown"),
        ("--context 300 --needles 1", "--needle-context 300"),
    ),
    ("termination", "csa_path"): (
        ("--budget 512", "would change nothing"),
        ("--needles 2", "pass --needles 0"),
        ("--tile 0", "--tile 0"),
    ),
    ("sparse-prefill --cuts 64,8,24 --tail 40", "gqa_path"): (
        ("--cuts 64,8", "expected CHUNK,LOCAL,HEAVY"),
        ("--context 100", "more than a chunk and the tail"),
        ("--context 300 --rows 0", "--rows 0"),
        ("--context 300 --asked-context 500", "fewer --needles"),
        ("--context 300 --text nowhere.txt", "cannot read the text"),
    ),
    ("sparse-prefill", "demo"): (("", "sparse prefill is of GQA models"),),
    ("recall", "gqa_path"): (("", "a GQA model has none"),),
}


@pytest.mark.parametrize(
    "command, checkpoint, options, message",
    [(*key, *case) for key, cases in REFUSED.items() for case in cases],
)
def test_what_cannot_be_measured_is_one_line(run, request, tmp_path, command, checkpoint, options, message):
    name, *given = command.split()
    path, out = request.getfixturevalue(checkpoint), tmp_path / "out"
    code, shown, err = run(name, path, *given, *options.split(), "--out", out)
    assert code == 2 and not shown and not out.exists() and "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: ") and message in err.splitlines()[-1]


def test_contexts_are_ascending_and_fit():
    assert ascending([300, 200, 300], (1,), 100) == (200, 300) and ascending(None, (64, 32, 128), 100) == (32, 64)
    assert ascending(None, (128,), 100) == (100,)
    check_range((2, 100), 100, "why")
    for contexts, said in (((1, 100), "--context 1: expected 2 … 100 tokens .why"), ((2, 101), "--context 101")):
        with pytest.raises(InputError, match=said):
            check_range(contexts, 100, "why")


def test_numbers_that_are_too_small_are_all_named():
    check_least({"rows": 1, "new_tokens": 0, "seed": -1}, rows=1, new_tokens=0)
    with pytest.raises(InputError, match="^--rows 1, --new-tokens -1: expected at least 1, 0$"):
        check_least({"rows": 1, "new_tokens": -1}, rows=1, new_tokens=0)
