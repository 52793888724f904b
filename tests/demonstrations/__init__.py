"""The lessons behind Warmgate as stories that run: what goes wrong, why, and what is done instead."""
