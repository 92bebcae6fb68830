"""What an image file says of itself, read without decoding it."""
