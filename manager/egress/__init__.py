"""Connections outward that tenants ask for: which addresses they may reach, and the proxy that dials for them."""
