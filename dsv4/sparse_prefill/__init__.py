"""What chunked sparse prefill kept, and what that is worth: measures over its `Memory`, as pure functions."""
