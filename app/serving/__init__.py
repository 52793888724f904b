"""Requests: from arrays to the device lane and back."""
