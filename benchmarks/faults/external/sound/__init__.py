"""Sound runs: tasks with a quality that each of them reaches."""
