"""Tables of documents and terminals (tables.py), and the templates of reports."""
