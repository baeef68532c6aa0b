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


def test_it_imports_no_torch():
    said = "import sys, dsv4.runtime.driver; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said]).returncode == 0
