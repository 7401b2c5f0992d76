"""What runs in the keeper, a process of its own: one Ray for several others. It knows nothing else of the package."""
