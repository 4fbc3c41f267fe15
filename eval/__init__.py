"""Measuring: videos against those of full attention, what heads lose, and times. Not needed to use vmonarch.

evaluate.py samples and writes (settings.py: what it is asked); similarity.py and prompt_score.py measure; summary.py
and report.py show. controls.py has methods to compare with. calibrate/ makes plans, bench/ takes times (wan_models.py:
of which models), vbench/ scores by the official package, render/ makes tables. ui.py is the web
page.

It may import all but `vmonarch.cli`. Begin with `evaluate.evaluate`.
"""
