"""Bytes in files to arrays and back."""
