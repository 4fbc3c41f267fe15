"""Monarch and VMonarch attention."""
