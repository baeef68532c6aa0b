"""The CUDA driver starts beside other things, once, and nothing goes on without it."""

import subprocess
import sys
import threading

import pytest

from dsv4.runtime import compiling, driver


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(driver, "_started", [])


def test_the_library_waits_for_the_start(monkeypatch):
    goes_on, made = threading.Event(), []
    monkeypatch.setattr(driver, "_loaded", lambda: made or (goes_on.wait(10) and made.append("driver")))
    driver.start("cuda:1")
    driver.start("cuda")
    assert len(driver._started) == 1 and not made
    goes_on.set()
    assert driver.library() == ["driver"] and not driver._started[0].is_alive()


def test_a_host_needs_no_driver():
    driver.start("cpu")
    assert not driver._started


def test_without_a_device(monkeypatch):
    monkeypatch.setattr(driver, "_loaded", lambda: None)
    with pytest.raises(compiling.InputError, match="no CUDA device 0; name a card"):
        compiling.present_gpu()


class Card:
    """A driver with one device, whose attributes are its number times ten plus what was asked for."""

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return int(index != 0)

    def cuDeviceGetAttribute(self, value, number, device):
        value._obj.value = 10 * device.value + number


def test_attributes_are_of_the_device_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(driver, "_loaded", Card)
    assert compiling.present_gpu() == ((75, 76), 16) and driver.attribute(driver.MPS) == 133
    with pytest.raises(compiling.InputError, match="no CUDA device 1; name a card"):
        compiling.present_gpu(1)


def test_it_imports_no_torch():
    said = "import sys, dsv4.runtime.driver; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said]).returncode == 0
