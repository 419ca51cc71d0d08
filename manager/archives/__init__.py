"""Archives of strangers made into the first layer of a workspace, by a child process with bounds of its own."""
