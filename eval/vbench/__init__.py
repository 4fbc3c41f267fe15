"""Scores of videos by VBench (Huang et al. 2024), from the official package in an environment of its own."""

from vmonarch.eval.vbench.installation import VBenchError, download_weights, install
from vmonarch.eval.vbench.scoring import DIMENSIONS, PromptedVideo, VBenchScore, read_videos, score_videos

__all__ = ["DIMENSIONS", "PromptedVideo", "VBenchError", "VBenchScore"]
__all__ += ["download_weights", "install", "read_videos", "score_videos"]
