"""Placers: what chooses a device for every op."""
