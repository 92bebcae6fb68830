"""This process's pool, and its peers' pools."""
