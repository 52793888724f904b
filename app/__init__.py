"""Warmgate: a model-serving sidecar whose readiness is proven, not assumed."""

__version__ = "0.5.0"
