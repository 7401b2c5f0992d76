"""What is measured while batches are loaded, and how it is shown."""
