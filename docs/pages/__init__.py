"""The pages of the documentation that scripts generate."""
