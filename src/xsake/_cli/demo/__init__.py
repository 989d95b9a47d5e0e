"""`xsake demo`: masks, a model and a prompt on whatever hardware is there."""
