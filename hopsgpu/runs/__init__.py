"""What the runs of launches, searches and scores share: status board, record, end and handle."""
