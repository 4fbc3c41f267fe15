"""Tables of documents and terminals (tables.py), figures and pages of reports (plot.py and the templates)."""
