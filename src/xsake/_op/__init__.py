"""The attention operation: arguments are checked, a backend and a configuration chosen, the call run."""
