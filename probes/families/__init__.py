"""The families of models that the probes know, and what is asked of whichever it is."""

from dsv4.probes.families.base import ProbedFamily
from dsv4.probes.families.deepseek_v4 import DeepSeekV4
from dsv4.probes.families.gqa import GQA

FAMILIES = {family.name: family for family in (DeepSeekV4(), GQA())}


def of(known) -> ProbedFamily:
    """The family of a subject, of a config, or of an inventory."""
    return FAMILIES[known.family]
