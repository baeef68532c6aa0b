"""`--kernel` of generate, batch, audit, recall and fidelity: what they say, write and refuse."""

import json

import pytest

from tests.dsv4.test_cli import demo  # noqa: F401  (fixture: a checkpoint with a tokenizer)
from tests.dsv4.test_user_kernels import IDS, file  # noqa: F401  (fixture: a file with kernels)


def test_generate_says_what_ran(command_line, demo, file):
    asked = ("generate", demo, "--prompt", "Hello", "--max-new-tokens", "4")
    plain = json.loads(command_line(*asked, "--json")[1])
    kernel = ("--kernel", f"sparse_attention={file}:same")
    code, out, err = command_line(*asked, *kernel, "--json")
    document = json.loads(out)
    assert code == 0 and document["token_ids"] == plain["token_ids"] and "kernels" not in plain
    assert document["kernels"]["sparse_attention"]["calls"] > 0
    first, last = err.splitlines()
    assert first == "kernel: sparse_attention runs mine.py:same; without the arguments complete, together"
    assert last.startswith("kernel: sparse_attention ran ") and last.endswith("mine.py:same, and through nothing else")
    assert command_line(*asked, *kernel, "--quiet")[2] == ""


def test_batch_says_what_ran(command_line, demo, file, tmp_path):
    (tmp_path / "r.jsonl").write_text('{"prompt": "Hello", "max_tokens": 3}\n')
    kernel = ("--kernel", f"sparse_attention={file}:same")
    code, out, err = command_line("batch", tmp_path / "r.jsonl", "--checkpoint", demo, *kernel)
    figures = json.loads(out.splitlines()[-1])["figures"]
    assert code == 0 and figures["kernels"]["sparse_attention"]["calls"] > 0
    assert err.splitlines()[-1].endswith("through mine.py:same, and through nothing else")


@pytest.mark.parametrize(
    "kernel, message",
    [
        ("sparse_attention", "names no operation; expected OPERATION=SPEC"),
        ("sparse_attention=none.py:f", "none.py cannot be read"),
        ("sparse_attention={file}:none", "it has broken, halved, same, scored, sinkless"),
        ("moe={file}:same", "moe is a fused form of experts, shared_expert"),
        ("index_scores={file}:same", "takes 7 arguments; expected 4"),
        ("index_scores={file}:scored", "never ran: the model calls index_scores only where"),
        ("sparse_attention={file}:halved", "mine.py:halved returned"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_code_2(command_line, demo, file, kernel, message):
    asked = ("generate", demo, "--token-ids", "5,6,7", "--max-new-tokens", "1", "--quiet")
    code, _, err = command_line(*asked, "--kernel", kernel.format(file=file))
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_one_kernel_for_an_operation(command_line, demo):
    both = ("--kernel", "linear=ours", "--kernel", "linear=reference")
    assert "names linear twice" in command_line("generate", demo, "--token-ids", "5", *both)[2]


def test_an_audit_names_a_faulty_kernel(command_line, official, file, tmp_path):
    """The sink left out: FAIL by the probe of edges, which names it, and by the comparison with the reference. That the
    model itself was not run is said."""
    probes = ("--probe", "edges", "--probe", "backend_matrix")
    asked = ("audit", official, *probes, "--out", tmp_path, "--kernel")
    code, _, err = command_line(*asked, f"sparse_attention={file}:sinkless")
    document = json.loads((tmp_path / "official_ours_fp32_with_sparse_attention.json").read_text())
    failed = {(s["probe"], c["part"]) for s in document["sections"] for c in s["checks"] if c["status"] == "FAIL"}
    assert {("edges", "sink"), ("backend_matrix", "sparse_attention")} <= failed
    assert {part for probe, part in failed if probe == "backend_matrix"} == {"sparse_attention"}
    assert code == 2 and "FAIL     backend_matrix" in err and "which ran no step" in err.splitlines()[-1]
    page = (tmp_path / "official_ours_fp32_with_sparse_attention.md").read_text()
    assert "kernels.sparse_attention.kernel | mine.py:sinkless" in page


def test_an_audit_that_runs_the_model_tells_how_often(command_line, official, file, tmp_path):
    asked = ("audit", official, "--probe", "memory_map", "--probe", "rope", "--out", tmp_path)
    code, _, err = command_line(*asked, "--kernel", f"sparse_attention={file}:same")
    assert code == 0 and "and through nothing else" in err.splitlines()[-1], err
    document = json.loads((tmp_path / "official_ours_fp32_with_sparse_attention.json").read_text())
    told = document["provenance"]["kernels"]["sparse_attention"]
    (check,) = [s for s in document["sections"] if s["probe"] == "user_kernels"][0]["checks"]
    assert check["status"] == "PASS" and check["measured"] == told["calls"] > 0 and told["kernel"] == "mine.py:same"


def test_a_kernel_belongs_to_dsv4_s_own_model(command_line, official):
    for subject in ("files", "transformers"):
        code, _, err = command_line("audit", official, "--subject", subject, "--kernel", "linear=ours")
        assert code == 2 and "--kernel would change nothing of subject" in err
    assert "differentiable" in command_line("audit", official, "--backend", "training", "--kernel", "linear=ours")[2]


def test_new_processes_and_second_models_of_an_audit_run_the_kernel(official, file):
    from dsv4.kernels.replacing import replacements_of
    from dsv4.probes.catalogue import fresh_process, placement
    from dsv4.probes.subjects.ours import OurSubject

    kernels = replacements_of({"sparse_attention": f"{file}:same"})
    subject = OurSubject(official, "fp32", kernels=kernels)
    asked = fresh_process.specified(subject, IDS, [60])["kernels"]
    assert asked == {"sparse_attention": f"{file}:same"}
    assert placement.loaded(subject, None).replacements == kernels


def test_recall_and_fidelity_put_it_into_their_documents(command_line, demo, file):
    kernel = ("--kernel", f"sparse_attention={file}:same", "--json", "--context", "64", "--needles", "0")
    recall = ("recall", demo, "--vacuous", "--queries", "4", "--rows", "1")
    fidelity = ("fidelity", demo, "--rows", "1", "--tail", "8", "--new-tokens", "0", "--queries", "4", "--topk", "4")
    for asked in (recall, fidelity):
        code, out, err = command_line(*asked, *kernel)
        document = json.loads(out)
        told = document["provenance"]["kernels"]["sparse_attention"]
        assert code == 0 and told["calls"] > 0 and told["other_calls"] == 0 and "mine.py:same" in document["title"]
        assert err.splitlines()[-1].endswith("mine.py:same, and through nothing else")
