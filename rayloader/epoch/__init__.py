"""One pass over the data: the schedule, and what carries it out in the driver."""
