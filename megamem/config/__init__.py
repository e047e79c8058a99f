"""Configuration: pydantic models, YAML loading with inheritance, dotted overrides."""
