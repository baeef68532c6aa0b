"""Hardware counters: what is read of ncu's CSV, in both of its forms, and what the script does where ncu cannot
count."""

import json
import os
import stat

import pytest
import torch

from dsv4.errors import InputError
from dsv4.kernels.errors import UnsupportedInput
from scripts import measure_counters
from scripts.bench import counters
from scripts.bench.counters import counted, parse
from scripts.bench.timing import Machine

FIRST = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream"'
SECTORS, REQUESTS, ASKED = counters.SECTORS[0], counters.REQUESTS[0], counters.ASKED[1]
WIDE = f"""==PROF== Connected to process 4711 (/usr/bin/python3)
a line of the program, with "quotes", and commas
"and one that ends within them
"and another
==PROF== Profiling "gather" - 0: 0%....50%....100% - 3 passes
{FIRST},"{counters.TIME}","{counters.READ}","{counters.WRITTEN}","{counters.HIT}","{SECTORS}","{REQUESTS}","{ASKED}"
"","","","","","","","nsecond","byte","byte","%","sector","","byte"
"0","4711","python3","h","gather(int, float)","1","7","20,000","30,000,000","0","40","1,000,000","100","16,000,000"
"1","4711","python3","h","gather(int, float)","1","7","10,000","15,000,000","3,000","10","500,000","50","n/a"
"2","4711","python3","h","void merge<4>(float)","1","7","5,000","0","1,500","n/a","n/a","n/a","n/a"
==PROF== Disconnected from process 4711
"""
METRICS = [
    ("0", "gather", counters.TIME, "usecond", "20"),
    ("0", "gather", counters.READ, "Mbyte", "30"),
    ("0", "gather", counters.WRITTEN, "byte", "0"),
    ("0", "gather", "launch__grid_size", "furlong", "1"),
    ("1", "gather", counters.TIME, "ms", "0.01"),
    ("1", "gather", counters.READ, "Kbyte", "15,000"),
    ("1", "gather", counters.WRITTEN, "Kbyte", "3"),
]
LONG = f'{FIRST},"Section Name","Metric Name","Metric Unit","Metric Value"\n' + "\n".join(
    f'"{i}","1","p","h","{kernel}","1","7","","{metric}","{unit}","{value}"'
    for i, kernel, metric, unit, value in METRICS
)


def test_a_line_a_launch_with_units_above():
    gather, merge = counted(parse(WIDE))
    assert (gather.kernel, gather.launches) == ("gather", 2) and (merge.kernel, merge.launches) == ("merge<4>", 1)
    assert gather.seconds == pytest.approx(30e-6) and (gather.read, gather.written) == (45e6, 3000)
    assert gather.bandwidth == pytest.approx(45.003e6 / 30e-6)
    assert gather.hit == pytest.approx((40 * 20 + 10 * 10) / 30)  # weighted by time
    assert gather.sectors_a_request == 10_000 and gather.efficiency == pytest.approx(16e6 / (32 * 1.5e6))
    assert merge.hit is None and merge.efficiency is None and merge.sectors_a_request is None


def test_a_line_a_metric():
    [gather] = counted(parse(LONG))
    assert gather.seconds == pytest.approx(30e-6) and (gather.read, gather.written) == (45e6, 3000)


def test_the_whole_is_the_sum_of_its_kernels():
    row = counters.Row("row", 90_000_000, counted(parse(WIDE)))
    found = row.document(2e12)
    assert found["whole"]["us"] == pytest.approx(35) and found["whole"]["launches"] == 3
    assert found["moved_over_needed"] == pytest.approx(45.0045e6 / 90e6) and len(found["kernels"]) == 2
    assert found["whole"]["share_of_bandwidth"] == pytest.approx(45.0045e6 / 35e-6 / 2e12)


@pytest.mark.parametrize(
    "text, said",
    [
        ("==PROF== nothing here\n", "ncu printed no table"),
        (WIDE.replace('"nsecond"', '"fortnight"'), "in 'fortnight'; expected one of %, sector"),
        (WIDE.replace('"20,000"', '"soon"'), "as 'soon'; expected a number"),
        (WIDE.replace('"20,000"', '"n/a"'), f"no {counters.TIME} of gather"),
    ],
    ids=["no table", "unit", "number", "no time"],
)
def test_what_cannot_be_read_is_one_line(text, said):
    with pytest.raises(InputError) as error:
        counted(parse(text))
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("sign", counters.REFUSALS)
def test_what_ncu_refuses_says_what_to_do(sign):
    with pytest.raises(UnsupportedInput, match=r"^ncu .*; "):
        counters.refused(f"==ERROR== {sign} - see the documentation")
    counters.refused(WIDE)


# ---- the script ----------------------------------------------------------------------


def run(monkeypatch, *given) -> int:
    monkeypatch.setattr("sys.argv", ["measure_counters.py", *map(str, given)])
    return measure_counters.main()


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Function: an ncu on the PATH that is this shell script; and as if there were a GPU that reads 2 TB/s."""

    def make(script: str) -> None:
        file = tmp_path / "bin" / "ncu"
        file.parent.mkdir()
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(file.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(measure_counters, "Clock", lambda: None)
    monkeypatch.setattr(measure_counters, "measure_machine", lambda clock: Machine("h100", 2e12, 8e14, 5.0, 1.0))
    return make


def printing(tmp_path, text: str) -> str:
    (tmp_path / "printed").write_text(text)
    return f"cat {tmp_path / 'printed'}"


TWO = "^gqa_gather 128K B[18] 28q"


def test_a_run_writes_each_row(ncu, monkeypatch, tmp_path, capsys):
    ncu(f'echo "$@" >> {tmp_path / "asked"}; ' + printing(tmp_path, WIDE))
    assert run(monkeypatch, "--only", TWO, "--out", tmp_path / "out") == 0
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2 and all(metric in asked[0] for metric in counters.METRICS)
    assert "--cache-control all" in asked[0] and "--child gqa_gather 128K B8 28q" in asked[1]
    found = json.loads((tmp_path / "out" / "counters_h100.json").read_text())
    assert [len(row["kernels"]) for row in found["rows"]] == [2, 2] and found["rows"][0]["needed_bytes"] > 0
    text = (tmp_path / "out" / "counters_h100.md").read_text()
    assert "| `gather` | 2 | 30.0 | 1500 | 75.0% | 30.0 % | 10000.0 | 33.3% | – |" in text
    assert "share: of the 2.00 TB/s at which this device reads" in text
    assert found["machine"] == {"bandwidth_bytes_per_second": 2e12}
    assert found["rows"][0]["kernels"][0]["share_of_bandwidth"] == pytest.approx(45.003e6 / 30e-6 / 2e12)
    assert "| `all` | 3 | 35.0 |" in text and "gqa_gather 128K B1 28q" in capsys.readouterr().out


def test_a_row_that_fails_is_a_line_and_the_next_is_counted(ncu, monkeypatch, tmp_path, capsys):
    ncu('case "$*" in *" B1 "*) echo broken >&2; exit 9;; esac; ' + printing(tmp_path, WIDE))
    assert run(monkeypatch, "--only", TWO, "--out", tmp_path / "out") == 1
    rows = json.loads((tmp_path / "out" / "counters_h100.json").read_text())["rows"]
    assert "exit code 9 under ncu: broken" in rows[0]["why"] and rows[1]["kernels"]


def test_rows_that_the_time_does_not_reach_are_named(ncu, monkeypatch, tmp_path, capsys):
    ncu("exit 9")
    assert run(monkeypatch, "--only", TWO, "--seconds", -1, "--out", tmp_path / "out") == 0
    assert (tmp_path / "out" / "counters_h100.md").read_text().count("not begun") == 2


def test_without_permission_it_is_one_line(ncu, monkeypatch, tmp_path, capsys):
    ncu("echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1")
    assert run(monkeypatch, "--only", TWO, "--out", tmp_path / "out") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "ERR_NVGPUCTRPERM" in err


def test_without_ncu_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    assert run(monkeypatch, "--only", TWO) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "ncu is not on the PATH; install" in err


def test_the_chosen_rows_are_of_every_kind(monkeypatch, capsys):
    assert run(monkeypatch, "--list") == 0
    names = capsys.readouterr().out.splitlines()
    kinds = {name.split()[0] for name in names}
    assert kinds >= {"gqa_decode", "gqa_gather", "chunked_prefill", "csa_decode", "hca_decode", "index_scores"}
    assert len(names) < 40 and names[0].startswith("chunked_prefill 4096 tokens")


def test_a_child_counts_its_second_run(monkeypatch):
    """Between the start and the stop of the profiler, once."""
    seen = []

    class Made:
        make = staticmethod(lambda i: ((lambda: seen.append("run")), None))

    monkeypatch.setattr(measure_counters, "collect", lambda device, only: ([Made], []))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    assert run(monkeypatch, "--child", "row") == 0 and seen == ["run", "start", "run", "stop"]
