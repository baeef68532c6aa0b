"""Contracts as definitions, workloads and data sets of FlashInfer-Trace."""

import ast
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from dsv4.kernels.contract import Argument, Case, Contract, Output, Work, rebuilt
from dsv4.kernels.contracts import contract_of, contracts
from dsv4.kernels.drawing import Draw
from dsv4.kernels.quantize import PackedWeight, WeightFormat, quantize_fp8, to_float
from dsv4.kernels.widths import SMALL
from dsv4.probes.kernel_audit.acceptance import truth_of
from dsv4.probes.kernel_audit.errors import KernelAuditError
from dsv4.probes.kernel_audit.plants import plants
from dsv4.probes.kernel_audit.trace import dataset
from dsv4.probes.kernel_audit.trace.definitions import Exporter, in_dialect
from dsv4.probes.kernel_audit.trace.workloads import tolerance, workload
from dsv4.probes.report import schema

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((ROOT / "probes/schema/kernel_trace-1.json").read_text())
OPERATIONS = list(contracts())
# `make test` runs one operation of each form of argument; the others are in `make test-all`
FEW = pytest.mark.few(
    operation=["sparse_attention", "index_scores", "topk_entries", "rms_norm", "grouped_linear", "choose_blocks"]
)


@cache
def exported(operation: str) -> tuple[Exporter, list]:
    exporter = Exporter(contract_of(operation), SMALL)
    return exporter, list(exporter.cases())


def problems(document: dict, kind: str) -> list[str]:
    return schema.problems(json.loads(json.dumps(document)), {"$ref": f"#/$defs/{kind}"}, root=SCHEMA)


@cache
def run_of(reference: str):
    space = {"__name__": "reference"}
    exec(compile(reference, "reference.py", "exec"), space)
    return space["run"]


def inputs(one) -> list:
    return [p.value.clone() if isinstance(p.value, torch.Tensor) else p.value for p in one.call.parts]


def results(one) -> list[torch.Tensor]:
    """What the exported reference returns for the exported inputs, as the schema has it."""
    found = run_of(one.definition["reference"])(*inputs(one))
    return [found] if isinstance(found, torch.Tensor) else list(found)


@FEW
@pytest.mark.parametrize("operation", OPERATIONS)
def test_definitions_follow_the_schema(operation):
    exporter, cases = exported(operation)
    assert len(cases) > 4 or exporter.skipped
    assert all(len(why.split()) > 4 for why in exporter.skipped)  # a sentence says what the schema cannot hold
    for made in exporter.definitions.values():
        assert problems(made, "definition") == []
        used = {axis for spec in made["inputs"].values() for axis in spec["shape"] or ()}
        known = used | {axis for spec in made["outputs"].values() for axis in spec["shape"]}
        assert known == set(made["axes"])
        assert {a for a, spec in made["axes"].items() if spec["type"] == "var"} <= used
        assert all("value" in spec for spec in made["axes"].values() if spec["type"] == "const")
        assert not set(made["inputs"]) & (set(made["axes"]) | set(made["outputs"]))
        assert made["name"].startswith(f"dsv4_{operation}_") and made["op_type"] == f"dsv4_{operation}"
        assert f"dsv4:{operation}" in made["tags"] and "strides" in made["description"]


@FEW
@pytest.mark.parametrize("operation", OPERATIONS)
def test_references_need_torch_alone_and_take_the_inputs_in_order(operation):
    for made in exported(operation)[0].definitions.values():
        tree = ast.parse(made["reference"])
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        library = {"abc", "collections", "contextvars", "enum", "functools", "math", "types", "typing", "__future__"}
        allowed = {"torch", *library}
        assert {name.split(".")[0] for name in names} <= allowed
        (run,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "run"]
        assert [a.arg for a in run.args.args] == list(made["inputs"])


@FEW
@pytest.mark.parametrize("operation", OPERATIONS)
def test_references_are_right_on_every_case(operation):
    contract = contract_of(operation)
    for one in exported(operation)[1]:
        found = results(one)
        for result, t in zip(one.call.results, found, strict=True):
            assert list(t.shape) == [one.call.sizes[axis] for axis in result.axes]
            assert str(t.dtype) == f"torch.{result.dtype}"
        back = [result.back(t) for result, t in zip(one.call.results, found)]
        judged = truth_of(contract, one.case, contract.default(one.dtype)).judge(back)
        assert judged.ratio <= 1, f"{one.call.name}, {one.case.family}: {judged}"


@FEW
@pytest.mark.parametrize("operation", OPERATIONS)
def test_infinite_results_are_tagged(operation):
    contract = contract_of(operation)
    infinite = {one.call.name for one in exported(operation)[1] if any(t.isneginf().any() for t in results(one))}
    tagged = {n for n, made in exported(operation)[0].definitions.items() if "dsv4:outputs=neginf" in made["tags"]}
    assert infinite == tagged, contract.operation


def test_names_and_bytes_of_packed_rows():
    made = exported("index_scores")[0].definitions["dsv4_index_scores_fp8_h4_d64_ps64"]
    assert made["inputs"]["keys"]["shape"] == ["batch", "num_pages", "page_bytes"]
    assert made["inputs"]["keys"]["dtype"] == "int8" and made["inputs"]["visible"]["dtype"] == "int32"
    assert made["axes"]["page_bytes"]["value"] == 64 * (64 + 4)
    assert made["outputs"]["scores"]["shape"] == ["batch", "tokens", "num_pages", "page_size"]
    assert "quantization:float8_e4m3fn" in made["tags"]
    plain = exported("index_scores")[0].definitions["dsv4_index_scores_bf16_h4_d64"]
    assert plain["inputs"]["keys"]["dtype"] == "bfloat16" and plain["inputs"]["visible"]["dtype"] == "int64"


def test_hints_and_arguments_that_are_none_are_no_inputs():
    made = exported("sparse_attention")[0].definitions[
        "dsv4_sparse_attention_bf16_no_entries_no_entry_index_h4_d128_w32"
    ]
    assert list(made["inputs"]) == ["q", "window", "window_index", "sink", "scale"]
    assert made["inputs"]["scale"]["shape"] is None
    assert "as hints: complete, together" in made["description"] and "Without entries" in made["description"]


def test_dialects():
    one = next(one for one in exported("index_scores")[1] if "fp8" in one.call.name)
    dumped = in_dialect(one.definition, "flashinfer", one.call)
    assert dumped["inputs"]["keys"]["dtype"] == "uint8" and one.definition["inputs"]["keys"]["dtype"] == "int8"
    assert problems(dumped, "definition")  # flashinfer-bench refuses it too
    assert "tags" not in in_dialect(one.definition, "sol", one.call)
    one = next(one for one in exported("sparse_attention")[1] if "fp8" in one.call.name)
    assert in_dialect(one.definition, "flashinfer", one.call)["inputs"]["entries"]["optional"] is True


def small_linear(weights: list[PackedWeight], **changes) -> Contract:
    """A contract of `linear` with one case for each weight."""
    exact = lambda x, w, simulate=False: x.double() @ to_float(w).double().T
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    contract = Contract(
        "linear",
        "y = x Wᵀ.",
        (
            Argument("x", ("num_tokens", "in_features"), "activation", "inputs"),
            Argument("w", ("out_features", "in_features"), "weight", "as stored"),
            Argument("simulate", None, "bool", "round x first"),
        ),
        (Output("y", ("num_tokens", "out_features"), "activation", "fp32 sums"),),
        exact,
        {"fp32": lambda x, w, simulate=False: (x.float() @ to_float(w).T).to(x.dtype)},
        lambda widths, draw: (Case("", "random", (x.to(draw.dtype), w, False)) for w in weights),
        lambda *arguments: Work(0, 0, ""),
        batch={"x": 0},
        dtypes=(torch.bfloat16,),
    )
    return replace(contract, **changes)


def test_weights_travel_as_codes_and_scales():
    draw = Draw(0)
    forms = [draw.weight(form, draw.matrix(128, 256)) for form in WeightFormat]
    fp32 = PackedWeight(WeightFormat.FP8, *quantize_fp8(draw.matrix(128, 256)))
    forms.append(fp32._replace(scale=fp32.scale.float()))
    contract = small_linear(forms)
    exporter = Exporter(contract, SMALL)
    cases = list(exporter.cases())
    assert exporter.skipped == {}
    assert [one.call.name.removeprefix("dsv4_linear_") for one in cases] == [
        f"{form}_k256_n128" for form in ("bf16", "fp8", "mxfp4", "nvfp4", "fp8_fp32_scales")
    ]
    for one in cases:
        assert truth_of(contract, one.case, "fp32").judge(results(one)).ratio <= 1
        assert problems(one.definition, "definition") == []
    kinds = {n: (i["dtype"], i["shape"]) for n, i in cases[2].definition["inputs"].items() if n.startswith("w")}
    assert kinds == {
        "w": ("int8", ["out_features", "in_features_bytes"]),
        "w_scale": ("int8", ["out_features", "in_features_blocks"]),
    }
    assert list(cases[3].definition["inputs"]) == ["x", "w", "w_scale", "w_global_scale", "simulate"]
    alone = replace(contract.arguments[0], shape=("num_tokens", "other"))  # no input has in_features but as pairs
    exporter = Exporter(replace(contract, arguments=(alone, *contract.arguments[1:])), SMALL)
    assert [one.call.name for one in exporter.cases()][2] == "dsv4_linear_mxfp4_other256_n128_k256"


def test_what_cannot_be_said_is_counted_with_a_reason():
    draw = Draw(0)
    contract = small_linear([draw.weight(WeightFormat.FP8, draw.matrix(128, 256))])

    def why(**changes) -> str:
        exporter = Exporter(replace(contract, **changes), SMALL)
        assert list(exporter.cases()) == []
        (reason,) = exporter.skipped
        return reason

    over = lambda number: (replace(contract.outputs[0], argument=number),)
    assert why(outputs=over(1)) == "it writes w in place, and the schema has no state"
    x, w, _ = next(iter(contract.cases(SMALL, draw))).arguments
    cases = lambda *arguments: lambda widths, draw: [Case("", "random", arguments)]
    assert why(cases=cases(x.double(), w, False)) == "input x is float64, which the schema does not have"
    assert why(cases=cases(x[:0], w, False)) == "input x is empty, and axes must be positive"
    assert why(cases=cases(x, w, object())) == "argument simulate is a object, expected tensors or a number"
    assert "neither an operation nor a composition" in why(operation="nothing")


@pytest.mark.sweep
def test_workloads_hold_every_input():
    for operation in OPERATIONS:
        for one in exported(operation)[1]:
            made = workload(one, "u", "blob/u.safetensors")
            line = {"definition": one.call.name, "workload": made, "solution": None, "evaluation": None}
            assert problems(line, "workload_line") == []
            assert list(made["inputs"]) == list(one.definition["inputs"])
            assert set(made["axes"]) == {a for a, s in one.definition["axes"].items() if s["type"] == "var"}


@FEW
@pytest.mark.parametrize("operation", OPERATIONS)
def test_tolerances_pass_honest_kernels_and_refuse_zeros(operation):
    contract = contract_of(operation)
    for one in exported(operation)[1]:
        truth = truth_of(contract, one.case, contract.default(one.dtype))
        allowed = tolerance(truth)
        assert problems({"uuid": "u", "axes": {}, "inputs": {}, "tolerance": allowed}, "workload") == []
        fits = lambda found: all(matched(f, e, allowed) for f, e in zip(found, truth.exact))
        assert fits(truth.honest), (one.call.name, one.case.family)
        if truth.honest[0].is_floating_point() and "zeros" not in one.case.exempt:
            assert not fits([torch.zeros_like(t) for t in truth.honest]), (one.call.name, one.case.family)


@pytest.mark.parametrize("fault", ["simulate is ignored", "FP8 of the rotated columns too", "the other direction"])
def test_tolerances_of_codes_beside_roundings_refuse_faults_of_both(fault):
    """Columns of a simulated latent are FP8 codes, but the rotated ones are rounded to bf16."""
    contract = contract_of("latent")
    plant = next(p for p in plants() if p.operation == "latent" and p.name == fault)
    refused = 0
    for one in exported("latent")[1]:
        if one.dtype is torch.bfloat16 and one.case.rules:
            truth = truth_of(contract, one.case, contract.default(one.dtype))
            allowed = tolerance(truth)
            found = plant.make(contract.classes[truth.accuracy])(*rebuilt(one.case.arguments, torch.clone))
            assert matched(truth.honest[0], truth.exact[0], allowed), one.case.family
            refused += not matched(found, truth.exact[0], allowed)
    assert refused  # in some case: one limit for all numbers of a case is wide


def matched(found: torch.Tensor, exact: torch.Tensor, allowed: dict) -> bool:
    """SOL-ExecBench's rule."""
    found, exact = found.double(), exact.double()
    both = found.isneginf() & exact.isneginf()
    if both.any() and not allowed["allow_negative_inf"]:
        return False
    off = torch.where(both, 0.0, found - exact).abs()
    right = off <= allowed["max_atol"] + torch.where(both, 0.0, allowed["max_rtol"] * exact.abs())
    return right.double().mean() >= allowed["required_matched_ratio"] and bool(off.amax() <= allowed["max_error_cap"])


@pytest.mark.parametrize("dialect", ["fib", "sol"])
def test_a_data_set_is_whole(dialect, tmp_path):
    made = dataset.write_dataset(tmp_path / "set", [contract_of("rms_norm")], SMALL, dialect)
    assert made.definitions["dsv4_rms_norm_bf16_h256"] == 7 and made.skipped == {}
    root = tmp_path / "set"
    name, kind = "dsv4_rms_norm_bf16_h256", "dsv4_rms_norm"
    lines = root / (f"workloads/{kind}/{name}.jsonl" if dialect == "fib" else f"{name}/workload.jsonl")
    first = json.loads(lines.read_text().splitlines()[0])
    source = (first["workload"] if dialect == "fib" else first)["inputs"]["x"]
    assert (root / ("" if dialect == "fib" else name) / source["path"]).is_file()
    solution = f"solutions/dsv4/{kind}/{name}/{name}_reference.json" if dialect == "fib" else f"{name}/solution.json"
    assert problems(json.loads((root / solution).read_text()), "solution") == []
    assert [p.name for p in tmp_path.iterdir()] == ["set"]
    with pytest.raises(KernelAuditError, match="is there already"):
        dataset.write_dataset(root, [], SMALL)


def test_a_data_set_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dataset, "save_tensors", full)
    with pytest.raises(KernelAuditError, match="No space left on device"):
        dataset.write_dataset(tmp_path / "set", [contract_of("rms_norm")], SMALL)
    assert list(tmp_path.iterdir()) == []


def test_flashinfer_bench_reads_what_is_written(tmp_path):
    data = pytest.importorskip("flashinfer_bench.data")
    bench = pytest.importorskip("flashinfer_bench.bench.utils")
    made = dataset.write_dataset(tmp_path / "set", contracts().values(), SMALL)
    found = data.TraceSet.from_path(str(tmp_path / "set"))
    assert {name: len(lines) for name, lines in found.workloads.items()} == made.definitions
    assert set(found.solutions) == set(found.definitions) == set(made.definitions)
    for name, lines in found.workloads.items():
        definition, line = found.definitions[name], lines[0].workload
        given = bench.gen_inputs(definition, line, "cpu", bench.load_safetensors(definition, line, tmp_path / "set"))
        assert definition.get_axes_values_from_inputs(given) == line.axes


def test_sol_execbench_reads_what_is_written(tmp_path):
    data = pytest.importorskip("sol_execbench.core.data")
    bench = pytest.importorskip("sol_execbench.core.bench.io")
    made = dataset.write_dataset(tmp_path / "set", contracts().values(), SMALL, dialect="sol")
    assert made.definitions
    for name in made.definitions:
        folder = tmp_path / "set" / name
        definition = data.Definition(**json.loads((folder / "definition.json").read_text()))
        lines = [data.Workload(**json.loads(line)) for line in (folder / "workload.jsonl").read_text().splitlines()]
        solution = data.Solution(**json.loads((folder / "solution.json").read_text()))
        assert (definition.name, solution.definition) == (name, name) and len(lines) == made.definitions[name]
        held = bench.load_safetensors(definition, lines[0], [folder])
        given = bench.gen_inputs(definition, lines[0], "cpu", held)
        assert len(given) == len(definition.inputs)
