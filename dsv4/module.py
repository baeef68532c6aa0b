"""nn.Module with a short way to submodules and calls: a decode step makes hundreds of both."""

from torch import nn
from torch.nn.modules import module as hooks


class Module(nn.Module):
    """Finds submodules as plain attributes, and calls `forward` directly while no hook is registered.

    Parameters stay in `_parameters` alone, where offloading exchanges them; what runs in every sublayer looks there directly.
    """

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value  # beside _modules, where nn.Module's own look-up would go through __getattr__

    def __call__(self, *args, **kwargs):
        if self._forward_hooks or self._forward_pre_hooks or hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)
