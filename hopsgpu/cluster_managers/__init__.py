"""What cluster managers report, behind one interface, and what it means for gangs and GPUs."""
