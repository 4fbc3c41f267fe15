"""Scores of videos by VBench (Huang et al. 2024), from the official package in an environment of its own."""

from vmonarch.eval.vbench.dimensions import DIMENSIONS, PAPER_DIMENSIONS
from vmonarch.eval.vbench.environment import VBenchEnvironment, VBenchError, install, load_environment
from vmonarch.eval.vbench.scoring import PromptedVideo, VBenchScore, score_videos
from vmonarch.eval.vbench.suite import SuiteItem, custom_suite, read_videos, standard_suite, suite_videos
from vmonarch.eval.vbench.weights import download_weights

__all__ = [
    "DIMENSIONS",
    "PAPER_DIMENSIONS",
    "PromptedVideo",
    "SuiteItem",
    "VBenchEnvironment",
    "VBenchError",
    "VBenchScore",
    "custom_suite",
    "download_weights",
    "install",
    "load_environment",
    "read_videos",
    "score_videos",
    "standard_suite",
    "suite_videos",
]
