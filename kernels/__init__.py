"""Numeric operations that have more than one implementation, one folder for each."""
