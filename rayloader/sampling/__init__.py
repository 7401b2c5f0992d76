"""What each rank and each worker reads, and how far ahead."""
