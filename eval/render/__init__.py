"""Tables and pages."""
