"""What documents name exists: options, commands with their flags, files, modules, and the sections that code cites."""

import argparse
import ast
import contextlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args, get_type_hints

import diffusers
import pytest
import torch
from peft import LoraConfig

import vmonarch
from vmonarch import BasedProcessor, FlashBiasProcessor, VMonarchProcessor, vmonarch_attention
from vmonarch.configs import preset_names
from vmonarch.configs.methods import resolve_method
from vmonarch.eval.evaluate import EvalConfig
from vmonarch.families import FAMILIES
from vmonarch.kernels.common.launch import HOPPER_DTYPES, HOPPER_HEAD_DIM, KERNEL_DTYPES, MAX_HEAD_DIM
from vmonarch.pipelines.kinds import KINDS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "finetune" / "embedded" / "README.md",
]
FOLDERS = ("configs", "eval", "examples", "finetune", "kernels", "pipelines", "tests", "vmonarch")
SOURCES = sorted({path.resolve() for name in FOLDERS for path in (ROOT / name).rglob("*.py")})
FILES = [
    os.path.relpath(Path(folder, file), ROOT)
    for top in (*FOLDERS, "docs")
    for folder, _, files in os.walk(ROOT / top)
    for file in files
] + os.listdir(ROOT)
PAPERS = ("VMonarch", "FlashBias", "Based", "VSA", "DeepSpeed Ulysses", "Train Short, Test Long")


def headings(text: str) -> set[str]:
    return set(re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M))


def rows(document: str) -> list[list[str]]:
    """The cells of all tables."""
    lines = re.findall(r"^\|(.*)\|$", (ROOT / document).read_text(), re.M)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


class Parsed(BaseException):
    """Raised where a command has parsed its arguments."""


@pytest.fixture
def commands_only_parse(monkeypatch):
    def stopping(parse):
        def parse_and_stop(self, args=None, namespace=None):
            raise Parsed(parse(self, args, namespace))

        return parse_and_stop

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, stopping(getattr(argparse.ArgumentParser, name)))


def prose(path: Path) -> str:
    """A document without its generated tables, which tell what was run at their time."""
    return re.sub(r"^<!-- table.*?^<!-- end -->", "", path.read_text(), flags=re.M | re.S)


def command_lines(text: str) -> list[tuple[str, str, list[str]]]:
    """(line, module, words) of every `vmonarch …` and `python -m vmonarch.… …`, whatever starts it."""
    text = re.sub(r"^```python.*?^```", "", text, flags=re.M | re.S).replace("\\\n", "")
    blocks, spans = re.findall(r"^ {4}(\S.*)$", text, re.M), re.findall(r"`([^`\n]+)`", text)
    found = []
    for line in [*blocks, *spans]:
        match = re.match(r"(?:\S+/)?(?:(?:python|accelerate|torchrun) .*?-m )?(vmonarch(?:\.\w+)*)(?= |$)(.*)", line)
        if match is None:
            continue
        words = [word for word in shlex.split(match[2], comments=True) if word != "…"]
        # What stands in a sentence may be a command's name alone.
        if line in blocks or any(word.startswith("--") for word in words):
            found.append((line, match[1], words))
    return found


def test_command_lines_are_found():
    text = "    accelerate launch --cpu -m vmonarch.finetune --config a …  # b\n`.venv/bin/vmonarch info --x`"
    assert [found[1:] for found in command_lines(text)] == [
        ("vmonarch.finetune", ["--config", "a"]),
        ("vmonarch", ["info", "--x"]),
    ]
    assert sum(len(command_lines(prose(path))) for path in DOCUMENTS) > 40


def parsed(module: str, words: list[str]) -> argparse.Namespace:
    if module == "vmonarch.finetune":
        module, words = "vmonarch", ["finetune", *words]
    if module == "vmonarch":
        main = importlib.import_module("vmonarch.cli").main
    else:
        started = importlib.import_module(module)
        main = (importlib.import_module(f"{module}.__main__") if hasattr(started, "__path__") else started).main
    with pytest.raises(Parsed) as stop:
        main(words)
    return stop.value.args[0]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_and_their_flags_exist(path, commands_only_parse):
    for line, module, words in command_lines(prose(path)):
        # What xfuser's runner is told is xfuser's.
        if module == "vmonarch.xfuser" or words[-1:] == ["--help"]:
            continue
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                options = vars(parsed(module, words))
        except SystemExit:
            pytest.fail(f"{line}\n{errors.getvalue()}")
        group = "finetune" if module == "vmonarch.finetune" else words[0] if words else ""
        if options.get("config"):
            assert options["config"].removeprefix("finetune/") in preset_names(group), line
        if module == "vmonarch" and group != "bench":
            for method in [*(options.get("methods") or []), *filter(None, [options.get("attention")])]:
                # Files of the reader's are not here.
                if not re.search(r"plan=\S+\.json|adapter=\S+\.safetensors", method):
                    resolve_method(method, recipes=True)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"(?:^ {4}|`)make ([\w-]+)", prose(path), re.M)) <= set(targets)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_modules_exist(path):
    text = prose(path)
    named = re.findall(rf"(?<![\w/.-])(?:docs|{'|'.join(FOLDERS)})/[\w./*-]*[\w*/]", text)
    named += re.findall(r"(?<![\w/.{-])[\w./*-]*\w\.(?:py|yaml|toml|log|md)\b", text)
    for name in {name.rstrip("/").removeprefix("vmonarch/") for name in named}:
        name = re.sub(r"^(\.\./)+", "", name)
        patterns = (name, f"*/{name}", f"{name}/*", f"*/{name}/*", f"configs/{name}.yaml")
        assert any(fnmatch(file, pattern) for file in FILES for pattern in patterns), name
    for name in set(re.findall(r"vmonarch(?:\.[A-Za-z_]\w*)+", text)):
        assert pkgutil.resolve_name(name) is not None


def test_readme_is_short_and_installs_before_it_calls_a_command():
    text = (ROOT / "README.md").read_text()
    own_words = re.sub(r"<!-- table: [\w-]+ -->.*?<!-- end -->", "", text, flags=re.DOTALL)
    assert len(own_words.splitlines()) <= 110
    assert -1 < text.find("pip install .") < text.index("\n    vmonarch ")


def test_the_api_names_what_is_public_and_activates_the_environment_before_its_commands():
    text = (ROOT / "docs" / "api.md").read_text()
    api = text.partition("\n## Public names\n")[2].partition("\n## ")[0]
    public = set(vmonarch.__all__) - {"__version__"}
    assert public <= set(re.findall(r"(\w+)[`(]", api))
    assert text.index(".venv/bin/activate") < text.index("\n    vmonarch ")


def test_the_support_matrix_is_what_the_code_supports():
    named = {row[0].split("`")[1] for row in rows("docs/families.md") if row[0].startswith("`")}
    pipelines = {name for name in named if name.endswith("Pipeline")}
    others = named - pipelines
    assert pipelines == {name for name, kind in KINDS.items() if not kind.wan}
    own = {name for name, family in FAMILIES.items() if family.own}
    matrix = {row[0].strip("`"): row[1:] for row in rows("README.md") if row[0][:1] == "`" and row[0][1:-1] in FAMILIES}
    assert set(matrix) == own and others == set(FAMILIES) - own
    assert len(others) == 18 and "eighteen" in (ROOT / "docs" / "faq.md").read_text()
    commands = {get_type_hints(getattr(diffusers, name).__init__)["transformer"] for name in KINDS}
    for model in (getattr(diffusers, name) for name in own):
        _, on, refresh, guidance, parallel, command = matrix[model.__name__]
        assert on == guidance == "yes" and refresh in ("yes", "untested")
        assert (parallel == "yes") == (getattr(model, "_cp_plan", None) is not None), model
        assert (command == "no") == all(model not in (found, *get_args(found)) for found in commands), model


def test_the_table_of_gpus_has_the_limits_of_the_kernels():
    heading = next(row for row in rows("README.md") if row[0] == "GPU")
    assert heading[1:4] == [
        f"16 bit, head dimension ≤ {HOPPER_HEAD_DIM}",
        f"16 bit, ≤ {MAX_HEAD_DIM}",
        f"float32, ≤ {MAX_HEAD_DIM}",
    ]
    assert set(KERNEL_DTYPES) == {torch.float16, torch.bfloat16, torch.float32}
    assert set(HOPPER_DTYPES) == {torch.float16, torch.bfloat16}


# Of documents whose snippets need what a test has not: several processes, VBench's environment, a GPU.
NOT_RUN = {"docs/engines.md", "docs/parallel.md", "docs/recipes.md", "docs/vbench.md"}


def snippets(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)


@pytest.fixture
def no_hub(tiny, monkeypatch, tmp_path):
    """`from_pretrained`; models of the hub are tiny ones, videos small, and the GPU is the CPU."""

    def from_pretrained(cls, *_, **__):
        pipe = tiny.pipeline("t2v")
        pipe.transformer = tiny.transformer(attention_head_dim=16)
        return pipe

    def evaluation_config(**options):
        return EvalConfig(output_dir="evaluation", **small, steps=2, **options)

    small = {"height": tiny.HEIGHT, "width": tiny.WIDTH, "num_frames": tiny.FRAMES}
    call = diffusers.WanPipeline.__call__
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", classmethod(from_pretrained))
    monkeypatch.setattr(diffusers.DiffusionPipeline, "to", lambda self, device: self)
    monkeypatch.setattr(
        diffusers.WanPipeline,
        "__call__",
        lambda self, *prompt, **options: call(self, *prompt, **{"num_inference_steps": 2} | options | small),
    )
    lora = LoraConfig(r=2, target_modules=["to_q"])
    load = lambda self, *_, **__: self.transformer.add_adapter(lora)
    monkeypatch.setattr(diffusers.WanPipeline, "load_lora_weights", load)
    monkeypatch.setattr(vmonarch.eval.evaluate, "EvalConfig", evaluation_config)
    monkeypatch.chdir(tmp_path)
    methods, layers = {"own": {"exact": {"band": 0}}}, {"transformer": [["own"] * 2] * 2}
    Path("plan.json").write_text(json.dumps({"format": "vmonarch-plan-1", "methods": methods, "layers": layers}))
    return diffusers.WanPipeline.from_pretrained


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if snippets(path)], ids=lambda path: path.name)
def test_snippets_run(path, tiny, no_hub):
    T, H, W = tiny.GRID
    q, k, v = torch.randn(3, 1, T * H * W, 12 if path.stem == "bias" else H, 8)
    q16, k16 = torch.randn(2, 1, T * H * W, H, 16)
    given = {"T": T, "H": H, "W": W, "grid": tiny.GRID, "q": q, "k": k, "v": v, "q16": q16, "k16": k16}
    given |= {"q1": q16[:, :1], "k1": k16[:, :1], "v1": v[:, :1], "decay": torch.rand(H, T, T)}
    given |= {"pipe": no_hub(), "diffusers": diffusers, "torch": torch, "vmonarch": vmonarch}
    if path.stem == "bias":
        given |= {name: torch.randn(1, 2048, 12, 2) for name in "qkv"}
    for snippet in snippets(path):
        code = compile(snippet, path.name, "exec")
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vmonarch"):
                assert all(hasattr(importlib.import_module(node.module), name.name) for name in node.names)
        if path.relative_to(ROOT).as_posix() not in NOT_RUN and "torchao" not in snippet:
            exec(code, given)


def test_the_commands_of_the_tutorial_make_what_it_says(monkeypatch, tmp_path, capsys):
    """As they stand but for a small video and one step; without the one that needs a model of the hub."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^ {4}(vmonarch .*)$", (ROOT / "docs" / "tutorial.md").read_text(), re.M)
    commands = [shlex.split(line)[1:] for line in blocks if "--config" not in line]
    assert [words[0] for words in commands] == ["info", "generate", "compare"]
    for words in commands:
        less = [] if words[0] == "info" else ["--steps", "1", "--num-frames", "5", "--height", "32", "--width", "32"]
        assert importlib.import_module("vmonarch.cli").main([*words, *less]) == 0
    assert {path.suffix for path in Path("outputs/generate").iterdir()} == {".mp4", ".png", ".json"}
    assert list(Path("outputs/compare").glob("*/*-side-by-side.mp4"))
    assert "| vmonarch-refresh |" in capsys.readouterr().out


def test_sections_that_code_cites_exist():
    sections = {path.relative_to(ROOT).as_posix(): headings(path.read_text()) for path in DOCUMENTS}
    cited = 0
    for path in SOURCES:
        if path == Path(__file__):
            continue
        text = path.read_text()
        for document, heading in re.findall(r'(docs/[\w/]+\.md), "([^"]+)"', text):
            assert heading in sections[document], f"{path} cites {document}, {heading}"
            cited += 1
        for line in text.splitlines():
            # Numbers of sections are those of a paper, which the line names.
            assert not re.search(r"§ ?\d", line) or any(paper in line for paper in PAPERS), f"{path}: {line}"
    assert cited > 10


def anchor(heading: str) -> str:
    """What a heading is called in a link."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")


def test_sections_that_links_name_exist():
    found = 0
    for path in DOCUMENTS:
        for file, section in re.findall(r"\]\(([^)\s#]*)#([^)]+)\)", path.read_text()):
            if not file.startswith("http"):
                target = path if not file else (path.parent / file).resolve()
                assert section in map(anchor, headings(target.read_text())), f"{path.name} points at {file}#{section}"
                found += 1
    assert found > 40


def test_errors_that_troubleshooting_explains_are_in_the_code():
    # As one text: messages are written over several lines.
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in SOURCES if "tests" not in path.parts))
    messages = [row[0].strip("`") for row in rows("docs/troubleshooting.md") if row[0].startswith("`")]
    assert len(messages) > 20
    for message in messages:
        for part in filter(None, re.split(r"\s*…\s*", message)):
            assert part in code, part


@pytest.mark.parametrize(
    ("document", "takes_options"),
    [
        ("docs/attention.md", vmonarch_attention),
        ("docs/attention.md", VMonarchProcessor),
        ("docs/attention.md", FlashBiasProcessor),
        ("docs/based.md", BasedProcessor),
    ],
)
def test_every_option_is_explained(document, takes_options):
    explained = {name for row in rows(document) for name in re.findall(r"`(\w+)`", row[0])}
    parameters = inspect.signature(takes_options).parameters.values()
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} <= explained


def test_defaults_in_the_documents_are_those_of_the_code():
    parameters = {
        **inspect.signature(VMonarchProcessor).parameters,
        **inspect.signature(vmonarch_attention).parameters,
    }
    stated = {}
    for name, default, *_ in rows("docs/attention.md"):
        if name.strip("`") in parameters and default:
            stated[name.strip("`")] = ast.literal_eval(default.strip("`"))
    assert len(stated) > 10
    assert {name: parameters[name].default for name in stated} == stated
