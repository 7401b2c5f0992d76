"""What frameworks need that create, rebuild or read loaders."""
