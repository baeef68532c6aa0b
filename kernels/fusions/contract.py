"""Contracts of the compositions that have public kernels."""

from dsv4.kernels.fusions import entries_contract, maps_contract, rows_contract, streams_contract

CONTRACTS = (
    *rows_contract.CONTRACTS,
    *entries_contract.CONTRACTS,
    *maps_contract.CONTRACTS,
    *streams_contract.CONTRACTS,
)
