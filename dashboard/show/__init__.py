"""Documents that pages show, and the static showcase."""
