"""What is needed to continue elsewhere: snapshots, journals, states."""
