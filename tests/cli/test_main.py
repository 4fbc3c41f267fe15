"""The command itself: speed, exit codes, help."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import pytest

from vmonarch import __version__
from vmonarch.cli import COMMANDS, build_parser, main


def test_help_takes_less_than_a_second_and_loads_nothing_heavy() -> None:
    code = "import sys; from vmonarch.cli import main; main(['--help']); print(sorted(sys.modules))"
    before = os.times()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = os.times()
    # Of the processor: how busy the machine is does not count.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1
    loaded = run.stdout.splitlines()[-1]
    assert "usage: vmonarch" in run.stdout
    # The parser has all commands with their arguments, so this holds for the help of each.
    assert "'vmonarch.cli.generate'" in loaded
    heavy = ("torch", "numpy", "diffusers", "transformers", "accelerate", "yaml", "imageio",
             "matplotlib", "jinja2")  # fmt: skip
    assert not [name for name in heavy if f"'{name}'" in loaded]


def test_every_command_has_help_with_its_options_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    helps = {}
    commands = build_parser().commands.values()
    for parser in (leaf for command in commands for leaf in command.commands.values() or [command]):
        assert main([*parser.prog.split()[1:], "--help"]) == 0
        helps[parser.prog] = capsys.readouterr().out
        assert helps[parser.prog].startswith(f"usage: {parser.prog} ") and "--debug" in helps[parser.prog]
    options = ("--model", "--seed", "--height", "--no-contact-sheet", "--attention", "--from-json", "vmonarch-t1")
    assert all(shown in helps["vmonarch generate"] for shown in (*options, "examples:\n  vmonarch generate "))
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for names in COMMANDS.values() for name in names)


def test_the_value_of_an_option_is_no_override() -> None:
    line = ["generate", "a", "--output-dir", "run=1", "steps=3", "--negative-prompt", "blur=bad"]
    _, arguments = build_parser().parse(line)
    found = arguments.prompts, arguments.output_dir, arguments.negative_prompt, arguments.overrides
    assert found == (["a"], "run=1", "blur=bad", ["steps=3"])


UNKNOWN: dict[str, str] = {
    "": "COMMAND",
    "paint": "invalid choice: 'paint' (choose from",
    "--paint": "COMMAND",
    "bench": "required: COMMAND",
}


@pytest.mark.parametrize(("line", "message"), UNKNOWN.items())
def test_unknown_commands(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert "usage: vmonarch" in err and message in err


def test_errors_are_one_line_with_a_traceback_for_debugging_or_where_none_explains_it(
    cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vmonarch.pipelines import sampling

    code, _, err = cli("generate", "a red circle", "--height", 40, "--debug")
    assert code == 2 and "Traceback" in err and err.splitlines()[-1].startswith("vmonarch generate: error: --height")

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error:\n  out of memory")

    monkeypatch.setattr(sampling, "deterministic_convolutions", broken)
    code, _, err = cli("generate", "a red circle", "--quiet")
    assert code == 1 and err.splitlines()[-1] == "vmonarch generate: error: RuntimeError: CUDA error: out of memory"
    assert "Traceback" in err and "in broken" in err


@pytest.mark.parametrize("name", ["torchao", "torch.utils._pytree"])
def test_what_the_import_of_torchao_says_is_shown_for_debugging_alone(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    assert main(["info", "--debug"]) == 0 and logging.getLogger(name).level == logging.NOTSET
    assert main(["info"]) == 0 and logging.getLogger(name).level == logging.ERROR


def test_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"vmonarch {__version__}"
    needed = [*requires("vmonarch"), 'no-such-package>=2,<3; extra == "more"', 'torch; extra == "more"']
    monkeypatch.setattr("importlib.metadata.requires", lambda _: needed)
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"extra more +missing no-such-package\n", text) and "extra ui" in text
    for word in (__version__, version("torch"), "embedded model", "cpu", "vmonarch-t1", "near-lossless"):
        assert word in text

    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    # A checkout that was never installed.
    monkeypatch.setattr("importlib.metadata.requires", absent)
    assert main(["info"]) == 0 and "extra" not in capsys.readouterr().out
