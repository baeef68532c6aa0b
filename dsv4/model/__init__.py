"""The chapters of the model, each equation in one place; the GQA family beside them in `gqa`."""

from dsv4.moved import former

__getattr__ = former(__name__, "dsv4.model.deepseek_v4")  # the names that `dsv4.model` had as a module
