"""What the emulator refuses."""


class EmulationError(RuntimeError):
    """The kernel does what is wrong on the device, or what the emulator does not know."""


class Deadlock(EmulationError):
    """Every partition waits; the message says for which barrier and phase."""


class UnknownName(EmulationError):
    """The kernel uses a name of Triton that has no emulation."""


def refuse(condition: bool, message: str) -> None:
    """Raise EmulationError(message) if the condition holds."""
    if condition:
        raise EmulationError(message)
