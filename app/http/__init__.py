"""The HTTP edge: probes, status, metrics, the inference protocol; it sees a servable and checks, nothing below."""
