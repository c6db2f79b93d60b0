"""Who gives executors: the interface that a launch uses. Implementations: `spark`, `local`."""
