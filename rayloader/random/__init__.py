"""Random generators: how they are found, and their states."""
