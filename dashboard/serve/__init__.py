"""The server: routes, guard, streams and the worker for users' texts."""
