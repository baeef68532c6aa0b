"""nn.Module with a short way to submodules and calls, of which a decode step makes hundreds; and when compositions
replace them."""

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.nn.modules import module as hooks

from dsv4.kernels.fusions import COMPOSITIONS


class Module(nn.Module):
    """Finds submodules as plain attributes, and calls `forward` directly while no hook is registered.

    Parameters stay in `_parameters` alone, where offloading exchanges them; what runs in every sublayer looks there
    directly.
    """

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        cls._defined = cls.forward

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value  # beside _modules, where nn.Module's own look-up would go through __getattr__

    def __call__(self, *args, **kwargs):
        if (
            self._forward_hooks
            or self._forward_pre_hooks
            or hooks._global_forward_hooks
            or hooks._global_forward_pre_hooks
        ):
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    @property
    def watched(self) -> bool:
        """Whether somebody outside sees or replaces what this module computes."""
        changed = "forward" in self.__dict__ or type(self).forward is not type(self)._defined
        return changed or bool(self._forward_hooks or self._forward_pre_hooks)


def fuses(op, name: str, *replaced: Module) -> bool:
    """Whether composition `name` is to run as one: the backend can; `op` is what the model bound, with no operation
    exchanged for another; and nobody watches the modules whose calls are replaced."""
    return name in op.fused and op is op.bound and not any(module.watched for module in replaced)


def composed(op, name: str) -> Callable:
    """Composition `name`: as one where it is to be, else its definition by the operations `op`."""
    return getattr(op, name) if fuses(op, name) else partial(COMPOSITIONS[name].default, op)
