"""The process that runs the user's function, and what that function can call."""
