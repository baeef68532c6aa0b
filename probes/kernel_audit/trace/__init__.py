"""Contracts as files of the FlashInfer-Trace schema: definitions, workloads, data sets."""
