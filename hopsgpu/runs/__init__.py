"""Status board, record, end and handle of a run: a launch, a search or a score."""
