"""What a worker's process takes over from the driver, as a fork would have it."""
