"""Processes that run one model together: which one this is (`ranks_asked`), joining them (`processes`), starting them
(`launch`)."""
