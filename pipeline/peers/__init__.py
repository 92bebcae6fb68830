"""Who is there: the other processes of a deployment."""
