"""What an accelerator gets: page-locked memory, and batches."""
