"""What commands print; the only package that imports rich."""
