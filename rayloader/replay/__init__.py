"""What a run has loaded: described, compared, built again."""
