"""The transformer: its shape, its layers, how they attend, and where they lie on devices."""
