"""Contracts of the compositions that have public kernels."""

from dsv4.kernels.fusions import entries_contract, maps_contract, rows_contract, step_contract, streams_contract

PRODUCTIONS = step_contract.PRODUCTIONS
CONTRACTS = (
    *rows_contract.CONTRACTS,
    *entries_contract.CONTRACTS,
    *maps_contract.CONTRACTS,
    *streams_contract.CONTRACTS,
    *step_contract.CONTRACTS,
)
