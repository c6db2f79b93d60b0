"""The rank's side: agents, ranks and the control channel. Nothing here imports Spark."""
