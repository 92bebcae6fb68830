"""The other processes of a deployment, as one process knows them."""
