"""Few combinations of parameters in place of all of them, where no three interact."""

from itertools import combinations, product


def pairs(*values):
    """Rows with one of each of `values`, such that any two values of two parameters meet in one of them.

    Found greedily, the same each time, and close to as few as there can be: the product of the two longest.
    """
    missing = {
        ((i, a), (j, b))
        for i, j in combinations(range(len(values)), 2)
        for a, b in product(range(len(values[i])), range(len(values[j])))
    }
    rows = []
    while missing:
        row = dict(min(missing))
        for place in range(len(values)):
            if place not in row:
                taken = list(row.items())
                row[place] = max(
                    range(len(values[place])),
                    key=lambda a: sum(tuple(sorted([(place, a), other])) in missing for other in taken),
                )
        missing -= set(combinations(sorted(row.items()), 2))
        rows.append(tuple(values[place][row[place]] for place in range(len(values))))
    return rows
