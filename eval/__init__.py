"""Metrics, comparisons and reports."""
