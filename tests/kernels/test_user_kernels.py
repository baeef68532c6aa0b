"""Kernels of users: where they are named, how they are loaded, what they must take and return."""

import inspect
import sys
from functools import partial

import pytest
import torch

from dsv4.kernels.dispatch import Composition, DispatchLedger, Operation, bind
from dsv4.kernels.errors import KernelFailed, KernelMismatch, KernelNotLoaded, UnknownOperation
from dsv4.kernels.operations import GQA_OPERATIONS, OPERATIONS
from dsv4.kernels.replacing import Replaced, Replacement
from dsv4.kernels.results import RESULTS, described, fits, wanted
from dsv4.kernels.user import KernelSpec, load_kernel, parse_binding, source_sha256
from dsv4.probes.scenes.contract_cases import calls
from dsv4.probes.subjects.files import FilesSubject
from tests.conftest import ROOT

SOURCE = """
import inspect
from beside import factor

def decorated(f):
    f.text = inspect.getsource(f)
    return f

@decorated
def double(x):
    return factor * x

number = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "beside.py").write_text("factor = 2\n")
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_a_binding_names_an_operation_and_a_place():
    assert parse_binding("linear=a/mine.py:f") == ("linear", KernelSpec("a/mine.py:f"))
    _, spec = parse_binding("linear = pack.age:f")
    assert (spec.place, spec.function, spec.file, spec.shown) == ("pack.age", "f", None, "pack.age:f")
    assert KernelSpec("a/mine.py:f").shown == "mine.py:f" and parse_binding("linear=ours")[1].backend == "ours"


@pytest.mark.parametrize(
    "text", ["linear", "=mine.py:f", "lin ear=mine.py:f", "linear=", "linear=mine.py", "linear=:f"]
)
def test_what_is_no_binding_is_refused(text):
    with pytest.raises(KernelNotLoaded, match="expected"):
        parse_binding(text)


def test_a_file_is_loaded_with_what_lies_beside_it_and_its_source(file):
    before = list(sys.path)
    function = load_kernel(f"{file}:double")
    assert function(4) == 8 and "def double" in function.text and sys.path == before
    assert "factor * x" in inspect.getsource(function) and len(source_sha256(function)) == 64
    assert load_kernel(f"{file}:double") is function


def test_a_changed_file_is_loaded_anew_and_two_folders_keep_apart(file, tmp_path):
    first = load_kernel(f"{file}:double")
    file.write_text(SOURCE.replace("factor * x", "factor + x"))
    assert load_kernel(f"{file}:double")(4) == 6 and first(4) == 8
    other = tmp_path / "other"
    other.mkdir()
    (other / "beside.py").write_text("factor = 5\n")
    (other / "mine.py").write_text(SOURCE)
    assert load_kernel(f"{other / 'mine.py'}:double")(4) == 20


def test_a_module_is_loaded_by_its_name():
    assert load_kernel("dsv4.kernels.attention.reference:sparse_attention").__name__ == "sparse_attention"


@pytest.mark.parametrize(
    "source, spec, said",
    [
        (None, "none.py:f", "none.py cannot be read"),
        (None, "no.such.module:f", "'no.such.module' was not found"),
        ("def f(:\n", "bad.py:f", "bad.py, line 1: "),
        ("x = 1\n\nraise ValueError('a b')\n", "bad.py:f", "importing bad.py raised ValueError: a b at bad.py:3"),
        ("import nothing_of_that_name\n", "bad.py:f", "ModuleNotFoundError.*at bad.py:1"),
        ("import sys\nsys.exit(3)\n", "bad.py:f", "SystemExit: 3 at bad.py:2"),
        ("def g(): pass\ndef h(): pass\n", "bad.py:f", "no f in .*; it has g, h"),
        ("from math import sin\n", "bad.py:f", "it defines no function"),
        ("f = 3\n", "bad.py:f", "f is a int; expected a function"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(tmp_path, monkeypatch, source, spec, said):
    monkeypatch.chdir(tmp_path)
    if source is not None:
        (tmp_path / "bad.py").write_text(source)
    before = set(sys.modules)
    with pytest.raises(KernelNotLoaded, match=said) as error:
        load_kernel(spec)
    assert "\n" not in str(error.value)
    assert (
        source is None or "no f" in said or "f is" in said or not [m for m in set(sys.modules) - before if "user" in m]
    )


def test_a_triton_kernel_without_its_grid_is_refused(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "k.py").write_text("import triton\n\n@triton.jit\ndef f(x):\n    pass\n")
    with pytest.raises(KernelNotLoaded, match="needs a grid"):
        load_kernel(f"{tmp_path / 'k.py'}:f")


# ---- in the place of an operation --------------------------------------------------------------------------------


def replaced(name: str, function, table=OPERATIONS) -> Replaced:
    return Replaced(table[name], Replacement.of(function), "cpu")


def attention(N=2, H=3, D=8, W=4):
    g = torch.Generator().manual_seed(0)
    q, window = (torch.randn(n, *more, generator=g) for n, more in ((N, (H, D)), (16, (D,))))
    index = torch.randint(16, (N, W), generator=g)
    return q, window, index, None, None, torch.zeros(H), 0.5


def test_hints_may_be_left_out_and_defaults_are_filled_in():
    short = replaced("sparse_attention", lambda q, window, index, entries, chosen, sink, scale: q)
    assert short.dropped == ("complete", "together") and torch.equal(short(*attention(), True, 2), attention()[0])
    seen = []
    whole = replaced("sparse_attention", lambda q, w, i, e, c, s, x, complete, together: seen.append(together) or q)
    whole(*attention())
    assert whole.dropped == () and seen == [1]
    assert replaced("sparse_attention", lambda *args: args[0]).dropped == ()


def test_an_argument_that_changes_the_result_is_not_left_out_silently():
    dense = replaced("simulate_fp8_blocks", lambda x, block: x)
    assert dense.dropped == ("keep",) and dense(torch.ones(2, 128), 64).shape == (2, 128)
    with pytest.raises(KernelMismatch, match="takes no keep.*with keep 16"):
        dense(torch.ones(2, 128), 64, 16)


@pytest.mark.parametrize(
    "function, said",
    [
        (lambda q: q, "takes 1 arguments; expected 7 to 9"),
        (lambda a, b, c, d, e, f, g, h, i, j: a, "takes 10 arguments; expected 7 to 9"),
        (lambda *args, mode: args, "wants mode by keyword"),
    ],
)
def test_a_function_of_other_arguments_is_refused_before_anything_runs(function, said):
    with pytest.raises(KernelMismatch, match=said):
        replaced("sparse_attention", function)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda q: None, r"returned None; expected float32 \[2, 3, 8\]"),
        (lambda q: q[:1], r"returned float32 \[1, 3, 8\]"),
        (lambda q: q.double(), r"returned float64 \[2, 3, 8\]"),
        (lambda q: (q, q), r"returned \(float32"),
        (lambda q: q.to("meta"), "returned a tensor on meta; expected cpu"),
        (lambda q: torch.empty(3, 2, 8).transpose(0, 1), r"strides \[8, 16, 1\]"),
    ],
)
def test_another_result_is_refused(change, said):
    with pytest.raises(KernelMismatch, match=f"operation sparse_attention: kernel .*{said}"):
        replaced("sparse_attention", lambda *args: change(args[0]))(*attention())


def test_an_operation_that_writes_its_arguments_returns_nothing():
    with pytest.raises(KernelMismatch, match="expected nothing, since it writes"):
        replaced("write_rows", lambda rows, slots, values: values)(None, None, torch.ones(1))


def test_what_a_kernel_raises_is_one_line_with_its_place():
    with pytest.raises(KernelFailed, match=r"raised ZeroDivisionError: .* at test_user_kernels.py:\d+"):
        replaced("sparse_attention", lambda *args: 1 / 0)(*attention())


@pytest.mark.parametrize("path, table", [("demo", OPERATIONS), ("demo_gqa", GQA_OPERATIONS)])
def test_the_table_of_results_is_the_references(path, table):
    assert RESULTS.keys() >= table.keys()
    config = FilesSubject(ROOT / path).config
    for name, op in table.items():
        given, reference = replaced(name, "reference", table), op.implementations["reference"]
        called = list(calls(name, reference, config, torch.bfloat16, 0))
        called = called or list(calls(name, reference, config, torch.float32, 0))  # of some contracts the only dtype
        assert called
        for arguments in called:
            given(*arguments)  # is held to the table
            lacking = list(inspect.signature(reference).parameters.values())[len(arguments) :]
            form = RESULTS[name](*arguments, *(p.default for p in lacking))
            found = reference(*arguments)
            assert fits(found, form), f"{name}: {described(found)}, not {wanted(form)}"


# ---- bound -------------------------------------------------------------------------------------------------------


def halve(x):
    return x / 2


def table():
    """Operations a and b, and what runs them as one."""
    operations = {n: Operation(n, {"reference": lambda x: x, "cpu": lambda x: x + 1}) for n in "ab"}
    both = Composition("both", ("a", "b"), lambda op, x: op.b(op.a(x)), {"cpu": lambda x: x + 2})
    alone = Composition("alone", ("b",), lambda op, x: op.b(x), {"cpu": lambda x: x + 1})
    return partial(bind, operations, "cpu", compositions={"both": both, "alone": alone})


def test_a_replaced_operation_takes_fused_ones_apart_and_is_counted_alone():
    ledger = DispatchLedger()
    op = table()(ledger, replacements={"a": halve})
    assert op.both(4) == 3 and op.alone(4) == 5
    assert op.unfused == ("both",) and op.fused == {"alone"}
    ran = {(row["operation"], row["implementation"]): row["calls"] for row in ledger.rows() if row["calls"]}
    assert ran[("a", "tests.kernels.test_user_kernels:halve")] == 1 and ran[("alone", "test_user_kernels")] == 1
    assert [row["operation"] for row in ledger.rows()].count("a") == 1 and ("both", "test_user_kernels") not in ran


def test_names_that_are_no_operations_are_refused_with_those_that_are():
    with pytest.raises(UnknownOperation, match="'c', which is no operation of this model; it has a, b"):
        table()(DispatchLedger(), replacements={"c": halve})
    with pytest.raises(UnknownOperation, match="both is a fused form of a, b"):
        table()(DispatchLedger(), replacements={"both": halve})


def test_the_training_backend_takes_none():
    with pytest.raises(KernelMismatch, match="differentiable"):
        bind(OPERATIONS, "training", DispatchLedger(), replacements={"linear": "reference"})


def test_ours_is_the_backend_s_own():
    op = table()(DispatchLedger(), replacements={"a": "ours", "b": "reference"})
    assert op.both(4) == 5 and op.unfused == ("both", "alone")
