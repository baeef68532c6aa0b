"""The self-test: every planted fault against every probe."""
