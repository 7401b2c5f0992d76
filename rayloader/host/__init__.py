"""The worker's process: what it sets up, fetches and collates."""
