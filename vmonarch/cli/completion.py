"""`vmonarch completion`.

examples:
  source <(vmonarch completion bash)                                       in ~/.bashrc
  vmonarch completion zsh > ~/.zfunc/_vmonarch                             a folder of $fpath
  vmonarch completion fish > ~/.config/fish/completions/vmonarch.fish
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `vmonarch completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="that the script is for")


def run(arguments: argparse.Namespace) -> None:
    """Print the script."""
    import shtab

    from vmonarch.cli import build_parser

    print(shtab.complete(build_parser(), arguments.shell))
    if arguments.shell == "bash":
        # Names of files where there is nothing else to complete.
        print("compopt -o default vmonarch")
