"""Run an agent task's commands in its own isolated sandbox: `Client`, `AsyncClient` and the command line `sojourn`."""
