"""Every numeric operation that has more than one implementation, a folder each."""
