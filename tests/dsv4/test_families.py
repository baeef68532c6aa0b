"""Code that is not a family's own asks the family's object, and never which family of models it is."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4.loaders.decoders import DECODERS
from dsv4.model import families
from dsv4.probes import families as probed
from dsv4.probes.probe import available, form_for, probe_named

ROOT = Path(__file__).resolve().parents[2]
OWN = (  # files of one family, and the lists of families
    "dsv4/model/gqa/",
    "dsv4/model/families.py",
    "dsv4/model/official.py",
    "probes/families/",
    "probes/catalogue/gqa/",
    "probes/scenes/gqa/",
    "probes/subjects/gqa.py",
    "probes/subjects/transformers_gqa.py",
    "probes/oracle/gqa.py",
)
NAMES = set(families.FAMILIES)
TYPES = {"ModelConfig", "Model", "GQAConfig", "GQAModel", "GroupedCache", "FittedCache", "HostCache", "GQAOracle"}
TYPES |= {"GQASubject", "OurGQASubject", "TransformersGQASubject"}
JUSTIFIED = {
    "dsv4/cost_model/defaults.py: kind == 'gqa'": "the kind of attention that dsv4 regime measures, not a model's "
    "family",
    "dsv4/cost_model/step.py: {'deepseek_v4': latent.layer_parts, 'gqa': gqa.layer_parts}": "the cost model lies above "
    "the families' layer: a row for each",
    "probes/catalogue/config_ledger.py: isinstance(held, ModelConfig)": "whether the model states a config of this "
    "project's; GQA models have a form of this probe",
}


def branches(tree: ast.AST) -> Iterator[str]:
    """Source of what asks which family it is: comparisons with a family's name, tables by such names, isinstance of a
    family's types, attributes that only one family's config has, `is_gqa`, `needs_of_gqa`."""
    for node in ast.walk(tree):
        asks = False
        if isinstance(node, ast.Compare | ast.MatchValue):
            asks = any(isinstance(n, ast.Constant) and n.value in NAMES for n in ast.walk(node))
        elif isinstance(node, ast.Dict):
            asks = len(NAMES & {k.value for k in node.keys if isinstance(k, ast.Constant)}) == len(NAMES)
            asks |= any(isinstance(k, ast.Attribute) and k.attr == "family" for k in node.keys)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            asks = bool(TYPES & {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(node.args[1])})
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hasattr":
            asks = getattr(node.args[1], "value", "") in ("windows", "compress_ratios", "num_key_value_heads")
        elif isinstance(node, ast.Name | ast.FunctionDef | ast.Attribute):
            name = getattr(node, "id", getattr(node, "name", getattr(node, "attr", "")))
            asks = name in ("is_gqa", "of_gqa", "needs_of_gqa", "not_for")
        if asks:
            yield ast.unparse(node)


def asked() -> Iterator[str]:
    for folder in ("dsv4", "probes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(OWN):
                yield from (f"{name}: {source}" for source in branches(ast.parse(path.read_text())))


def test_nothing_but_a_familys_own_files_asks_which_family_it_is():
    found = set(asked())
    assert not found - set(JUSTIFIED), "\n".join(sorted(found - set(JUSTIFIED)))
    assert not set(JUSTIFIED) - found, "no longer there; take it off the list"


@pytest.mark.parametrize(
    "source,asks",
    [
        ('subject.family == "gqa"', True),
        ('"deepseek_v4" != known.family', True),
        ("isinstance(cache, GroupedCache)", True),
        ("isinstance(config, models.GQAConfig | Other)", True),
        ('hasattr(config, "windows")', True),
        ('ROWS = {"deepseek_v4": rows, "gqa": other}', True),
        ("needs_of_gqa = frozenset()", True),
        ('case.family == "random"', False),
        ("families.of(subject).windows(config)", False),
        ("isinstance(cache, PagedCache)", False),
    ],
)
def test_a_branch_is_seen(source, asks):
    assert bool(list(branches(ast.parse(source)))) is asks


def test_the_probes_know_the_families_that_the_engine_runs():
    assert set(probed.FAMILIES) == NAMES and len(DECODERS) > 2
    for name, family in probed.FAMILIES.items():
        assert family.name == name and families.FAMILIES[name].title == family.title


@pytest.mark.parametrize("family", probed.FAMILIES.values(), ids=lambda family: family.name)
def test_reasons_and_forms_are_of_probes_of_the_catalogue(family):
    """A probe's form for a family has the probe's name, and keeps its seed and effort."""
    known, subject = available(), SimpleNamespace(family=family.name)
    forms = {path.stem for path in (ROOT / "probes/catalogue" / family.name).glob("*.py")} - {"__init__"}
    assert set(family.lacks) <= set(known) and forms <= set(known) - set(family.lacks)
    for name in known:
        probe = probe_named(name)(seed=3, effort=0.5)
        form = form_for(probe, subject)
        assert (form is not probe) == (name in forms) and isinstance(form, type(probe)), name
        assert (form.name, form.seed, form.effort) == (name, 3, 0.5)
