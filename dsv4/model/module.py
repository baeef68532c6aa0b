"""nn.Module with faster access to submodules and faster calls, because a decode step makes hundreds; and the rule that
decides when compositions replace modules."""

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.nn.modules import module as hooks

from dsv4.kernels.fusions import COMPOSITIONS


class Module(nn.Module):
    """Finds submodules as plain attributes, and calls `forward` directly while no hook is registered.

    Parameters are only in `_parameters`, where offloading exchanges them; code that runs in every sublayer reads them
    there.
    """

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        cls._defined = cls.forward

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value  # outside of _modules, where nn.Module's look-up would go through __getattr__

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
        """Whether a hook or a replaced method sees or changes what this module computes."""
        changed = "forward" in self.__dict__ or type(self).forward is not type(self)._defined
        return changed or bool(self._forward_hooks or self._forward_pre_hooks)


def fuses(op, name: str, *replaced: Module) -> bool:
    """Whether composition `name` may run as one: the backend has it, `op` is what the model bound (no operation was
    exchanged), and no module whose call is replaced is watched."""
    return name in op.fused and op is op.bound and not any(module.watched for module in replaced)


def composed(op, name: str) -> Callable:
    """Composition `name`: as one if it may run so, else its definition with the operations `op`."""
    return getattr(op, name) if fuses(op, name) else partial(COMPOSITIONS[name].default, op)
