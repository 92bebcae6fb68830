"""What this machine can do, and the transport that follows."""
