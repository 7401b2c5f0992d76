"""The driver's side: what `iter()` returns, the schedule, the actors."""
