"""What happens to a batch between the schedule and the user."""
