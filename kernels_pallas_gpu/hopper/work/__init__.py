"""Items of work: who takes which, and how rows of the other side stream past them."""
