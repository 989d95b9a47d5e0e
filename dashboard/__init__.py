"""The dashboard: a server that reads what training, tuning and evaluation write, and the same pages as static files."""
