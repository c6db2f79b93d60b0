"""From the world to a framework's environment variables: pure functions."""
