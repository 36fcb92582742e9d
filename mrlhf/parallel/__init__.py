"""Launching, layouts and collectives."""
