"""Which module a difference comes from: bisection against the oracle, exchange of modules, ablation."""
