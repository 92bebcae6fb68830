"""Deployment files that ship with the package."""
