"""A check is green only for evidence that could have been red."""

from dsv4.probes.result import Check, Status, compare, vacuous, worst


def test_comparisons():
    about = dict(source="spec", samples=3)
    assert compare("a", 1.0, "<=", 2.0, **about).status is Status.PASS
    assert compare("a", 3.0, "<=", 2.0, **about).status is Status.FAIL
    assert compare("a", 0.99, ">=", 0.999, **about).status is Status.FAIL
    assert compare("a", "x", "==", "x", **about).status is Status.PASS


def test_missing_evidence_is_vacuous():
    assert compare("a", 1.0, "<=", 2.0, source="spec", samples=0).status is Status.VACUOUS
    assert compare("a", None, "<=", 2.0, source="spec", samples=3).status is Status.VACUOUS
    assert vacuous("a", "no indexer").status is Status.VACUOUS
    assert worst([]) is Status.VACUOUS


def test_what_chance_would_pass_proves_nothing():
    check = compare("recall", 0.995, ">=", 0.4, source="spec", samples=10, chance=0.5)
    assert check.status is Status.VACUOUS and "chance alone scores 0.5" in check.note
    assert compare("recall", 0.3, ">=", 0.4, source="spec", samples=10, chance=0.5).status is Status.FAIL


def test_nan_fails():
    assert compare("a", float("nan"), "<=", 2.0, source="spec", samples=3).status is Status.FAIL


def test_worst_of_many():
    checks = [Check("a", status) for status in (Status.PASS, Status.VACUOUS, Status.WARN)]
    assert worst(checks) is Status.VACUOUS
    assert worst([*checks, Check("b", Status.FAIL)]) is Status.FAIL
    assert "threshold" not in checks[0].to_json() and checks[0].to_json()["status"] == "PASS"
