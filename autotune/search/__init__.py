"""Problems, studies of their configurations, and the loop over them."""
