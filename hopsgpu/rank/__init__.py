"""The process that runs the user's function, and the API that the function can call."""
