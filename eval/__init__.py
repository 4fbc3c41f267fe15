"""Evaluation: video quality against full attention, what each head loses, and speed. Not needed to use vmonarch.

evaluate.py samples videos and writes the results, as settings.py describes; similarity.py and prompt_score.py measure
them; summary.py and report.py present them. controls.py has methods to compare with. calibrate/ makes plans, bench/
measures speed (of the models in wan_models.py), vbench/ scores videos with the official package, render/ makes tables
and ui.py is the web page.

This package may import everything but `vmonarch.cli`. Begin with `evaluate.evaluate`.
"""
