"""Any batch of a run again: what each batch was, and how to build it once more."""
