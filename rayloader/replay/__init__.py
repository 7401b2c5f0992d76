"""Any batch of a run again: what a run leaves behind, and building one batch from it."""
