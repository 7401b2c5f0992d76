"""The keeper, a process of its own: holds one Ray for several others. It imports nothing else of the package."""
