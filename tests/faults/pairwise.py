"""A sample of a table: few rows in which all that shall meet meets."""


def sample(rows, meetings):
    """Rows picked greedily, so always the same ones, until each meeting of the table is in one of them.

    Args:
        rows: all rows.
        meetings: gives the set of what meets in a row, such as the pairs of its values.
    """
    missing = set().union(*map(meetings, rows))
    picked = []
    while missing:
        best = max(rows, key=lambda row: len(missing & meetings(row)))  # the first of the best
        picked.append(best)
        missing -= meetings(best)
    return picked
