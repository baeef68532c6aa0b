"""The benchmark's trace and report; its times need a GPU."""

from scripts.bench import host_tier_report
from scripts.bench.host_tier import Trace


def test_a_trace_has_the_asked_locality():
    trace, kept = Trace(20, 50, 5000, 0.9), []
    before = trace.now.clone()
    for _ in range(10):
        now = trace.step()
        assert all(len(set(row)) == 50 and 0 <= min(row) and max(row) < 5000 for row in now.tolist())
        kept += [len(set(a) & set(b)) / 50 for a, b in zip(before.tolist(), now.tolist())]
        before = now.clone()
    assert abs(sum(kept) / len(kept) - 0.9) < 0.01


def test_a_report_says_what_fell_short():
    step = {
        "seconds": 0.004,
        "hits": 90,
        "misses": 10,
        "hit_rate": 0.9,
        "bytes_a_step": 65536.0,
        "bytes_a_second": 40e9,
        "of_link": 0.8,
        "locality": 0.9,
    }
    slow = step | {"seconds": 0.005, "locality": 0.0, "bytes_a_second": None, "of_link": None}
    grouped = {
        "layers": 2,
        "batch": 1,
        "context": 1024,
        "kept": 32,
        "slots": 64,
        "host_bytes": 4096,
        "formula": "2 × 2",
        "device_bytes": 7,
        "resident_seconds": 0.001,
        "dense_resident_seconds": 0.002,
        "stream_seconds": 0.06,
        "link": 50e9,
        "rows": [step, slow],
    }
    entries = [
        step
        | {
            "rows": "bf16",
            "layers": 21,
            "entries": 262144,
            "resident_seconds": 0.001,
            "link": 50e9,
            "host_bytes": 9,
            "slots": 1024,
            "device_bytes": 3,
            "locality": x,
            "batch": b,
        }
        for b in (1, 8)
        for x in (0.9, 1.0)
    ]
    way = {"seconds": 0.01, "tokens_a_second": 100.0, "hit_rate": 0.5, "fetched_a_step": 2e6, "guessed_a_step": 1e6}
    model = {
        "geometry": "g",
        "layers": 2,
        "csa_layers": 1,
        "context": 1024,
        "batch": 1,
        "weight_bytes": 10**9,
        "device_cache_bytes": 5,
        "host_bytes": 9,
        "policy": "p",
        "kept": 32,
        "slots": 64,
    }
    about = {"device": "NVIDIA H100", "torch": "2", "triton": "3", "commit": "c", "command": "python x"}
    report = {
        "about": about,
        "link": {"to_device": 50e9, "to_host": 49e9, "together": 90e9, "kernel": 45e9},
        "seconds": {"grouped": 3.2},
        "grouped": grouped,
        "entries": entries,
        "decode": model | {"rows": [way | {"way": "staged"}, way | {"way": "dense", "seconds": 0.2}]},
        "flash": model
        | {
            "rows": [
                {"way": "resident", "seconds": 0.009, "tokens_a_second": 111.1, "device_cache_bytes": 11},
                way | {"way": "staged", "device_cache_bytes": 4},
            ]
        },
    }
    text = host_tier_report.markdown(report)
    assert (
        text.count("of the link: NOT reached: 80% at best") == 2
        and "15.0×" in text
        and "90.0% | 65.5 kB | 4.00 | 40.0 GB/s | 80%" in text
    )
    assert (
        "reference 15×: NOT reached: 12.0× where every choice is new, up to 15.0×" in text
        and "| 100.0 | 20.0× |" in text
    )
    assert (
        "every choice new" in text
        and "nothing is missing: 142.9 µs with bf16, 142.9 µs with bf16, batch 8." in text
        and "| bf16, batch 8, 21 layers × 262144 |" in text
        and "grouped 3 s" in text
    )
    assert (
        "device memory, goal 3×: NOT reached: 2.8× (14 over 5 bytes of caches)" in text
        and "goal 3×: NOT reached: 2.8× (11 over 4" in text
    )
    assert "takes 11.1% more with 50% of the choices staged; goal 5% with 90%: NOT reached: 11.1%." in text
    entries[0]["host_bytes"] = entries[1]["host_bytes"] = 4 * 262144 * 4609
    assert "a token, goal 4.5 KiB: NOT reached: 4.50 KiB with bf16." in host_tier_report.markdown(report)
    entries[1]["host_bytes"] -= 4 * 262144
    assert "a token, goal 4.5 KiB: reached (4.50 KiB with bf16)." in host_tier_report.markdown(report)
    assert host_tier_report.svg(report) == host_tier_report.svg(report)
    step["of_link"] = 0.9
    assert "link: reached (90% at best)" in host_tier_report.markdown(report)
    part = {key: report[key] for key in ("about", "link", "seconds")}
    assert "## " not in host_tier_report.markdown(part) and host_tier_report.svg(part)  # before any part has run
