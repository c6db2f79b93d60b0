"""What YARN's daemons say over REST."""
