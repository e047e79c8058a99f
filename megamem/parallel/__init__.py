"""Process groups and parallel linear layers."""
