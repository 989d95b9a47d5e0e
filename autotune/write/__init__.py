"""What tuning leaves behind: entries, tables and plots."""
