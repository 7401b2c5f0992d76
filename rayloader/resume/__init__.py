"""States: of the user's position, of workers, of samplers; where an epoch continues."""
