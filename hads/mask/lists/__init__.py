"""The compressed rows of a mask: how they are made, and in which order they lie."""
