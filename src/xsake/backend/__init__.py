"""The contract between the operation and a backend: what a backend gets, and what it provides."""
