"""Many requests at once over one pool of pages."""

from dsv4.engine.batch import BatchEngine
from dsv4.engine.requests import Request, Result, read_requests

__all__ = ["BatchEngine", "Request", "Result", "read_requests"]
