"""What a model costs by formula: parameters, FLOPs, state bytes, and peaks of devices."""
