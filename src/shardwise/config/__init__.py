"""What a user writes: ``model`` (the pydantic models), ``resolve`` (defaults, products, origins)."""
