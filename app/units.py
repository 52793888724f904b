"""Numbers as people read them."""


def bytes_text(count: int) -> str:
    """Return a number of bytes in decimal units: `90.9 MB`."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
