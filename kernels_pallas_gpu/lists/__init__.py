"""Small programs over a mask's lists."""
