"""Signals that ask a process to end, as exceptions: what a `finally` removes is removed then too."""

import signal
from contextlib import contextmanager

ASKED_TO_END = ("SIGTERM", "SIGHUP")


class Stopped(SystemExit):
    """The process was asked to end by `signal`; its exit code is 128 + the signal's number, as a shell reports it."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.signal = signal.Signals(number).name


@contextmanager
def stopped_by_signals():
    """Within it, SIGTERM and SIGHUP raise Stopped and SIGINT raises KeyboardInterrupt, each once: while the first is
    being cleaned up after, further ones are ignored. Only for the main thread."""
    numbers = [signal.SIGINT, *(getattr(signal, name) for name in ASKED_TO_END if hasattr(signal, name))]

    def stop(number, frame):
        for each in numbers:  # not SIG_IGN, of which Python complains where two signals came at once
            signal.signal(each, lambda *_: None)
        raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)

    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] is not signal.SIG_IGN:  # nohup asked for SIGHUP to be ignored
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number] if before[number] is not None else signal.SIG_DFL)
