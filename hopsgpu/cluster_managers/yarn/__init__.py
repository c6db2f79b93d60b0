"""YARN's daemons over REST, and what their answers mean for gangs and GPUs."""
