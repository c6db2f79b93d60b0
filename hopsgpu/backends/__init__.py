"""The interface through which a launch gets executors. Implementations: `spark`, `local`."""
