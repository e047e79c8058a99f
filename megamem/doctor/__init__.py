"""What is installed and what this machine can do, as findings."""
