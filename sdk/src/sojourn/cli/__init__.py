"""The command line: `main` lists the commands and makes a message and exit code 125 of whatever fails."""
