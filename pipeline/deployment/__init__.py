"""A deployment file: YAML to frozen structs."""
