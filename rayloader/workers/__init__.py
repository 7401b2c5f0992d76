"""Who builds batches, as the driver sees them: processes, channels, placement."""
