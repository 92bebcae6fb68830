"""One process, from exec to exit; and the supervisor of all."""
