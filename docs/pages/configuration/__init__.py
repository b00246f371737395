"""The page of the configuration: what each field means, and the tables of fields."""
