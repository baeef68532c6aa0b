"""Every planted fault can still be planted: what it replaces exists, and is called as before."""

from shutil import copytree, rmtree

import pytest

from dsv4.errors import Dsv4Error
from dsv4.loaders.load import Inventory
from dsv4.probes.faults import Site, catalogue
from dsv4.probes.faults import profile as profiles


def test_every_fault_can_be_planted(tmp_path):
    sound, damaged = tmp_path / "sound", tmp_path / "damaged"
    sound.mkdir()
    for m in catalogue():
        if not (sound / m.profile).exists():
            profiles.write(sound / m.profile, m.profile)
        copytree(sound / m.profile, damaged)
        site = Site(damaged)
        try:
            m.plant(site)
        finally:
            site.undo()
            rmtree(damaged)


def test_a_function_that_cannot_be_called_as_the_one_before_is_refused(tmp_path):
    site, before = Site(tmp_path), Inventory.read
    with pytest.raises(Dsv4Error, match=r"planted Inventory.read cannot be called .* expected \(self, name"):
        site.patch(Inventory, "read", lambda inventory, name: None)
    assert Inventory.read is before
