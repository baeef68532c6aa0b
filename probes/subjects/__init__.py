"""Kinds of subject. See probes/subject.py."""
