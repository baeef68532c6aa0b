"""Requests on their way: one state, one loop, and the ways to advance it; one request at a time, or many at once over
one pool of pages.

- `state`: what was asked, what came of it, and what decides how it goes on; `limits`: what a request must fit.
- `steppers`: the loop, and single tokens, passes and rounds that it advances requests by; `passes`: one pass of several
  rows, on pages or not; `acceptance`: which tokens a pass gives.
- `generate`: generation from prompts; `batch`: the engine of many requests, whose files `requests` reads, and whose
  figures `watch`, `report` and `plots` tell.
"""

from dsv4.engine.batch import BatchEngine
from dsv4.engine.requests import read_requests
from dsv4.engine.state import Request, Result

__all__ = ["BatchEngine", "Request", "Result", "read_requests"]
