"""What the command line's commands do, one module each; imported when a command runs."""
