"""What an encoded image says of itself, read and checked before Pillow sees a byte of it; one file a format."""
