"""Learning a model's heads: what dense attention does, what an error costs, and the fitted profile."""
