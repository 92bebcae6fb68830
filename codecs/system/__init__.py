"""What the kernel gives: files, descriptors, process handles, locks."""
