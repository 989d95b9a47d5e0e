"""What HADS knows of a model: `HadsProfile`, the rule it was made with, and exact budgets."""
