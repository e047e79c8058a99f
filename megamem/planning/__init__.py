"""What a configuration costs: parameters and state bytes."""
