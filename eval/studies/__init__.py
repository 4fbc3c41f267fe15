"""Studies: one script each, run by hand; nothing imports them but their tests."""
