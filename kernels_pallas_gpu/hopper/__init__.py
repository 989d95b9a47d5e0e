"""The Mosaic GPU backend: Hopper's tensor cores and copy engine."""
