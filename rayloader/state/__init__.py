"""What it takes to go on elsewhere: snapshots, journals, states."""
