"""The control channel between the driver and its agents: frames, authentication, TLS, server."""
