"""What documents name exists: options, commands with their flags, files, modules, and the sections that code cites.

Their numbers are those of results files, which say where they come from.
"""

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
import runpy
import shlex
import statistics
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args, get_type_hints

import diffusers
import pytest
import support_matrix
import torch
from peft import LoraConfig

import vmonarch
from vmonarch import BasedProcessor, FlashBiasProcessor, VMonarchProcessor, vmonarch_attention
from vmonarch.configs import preset_names
from vmonarch.configs.methods import resolve_method
from vmonarch.eval.evaluate import EvalConfig
from vmonarch.eval.render import tables
from vmonarch.families import FAMILIES
from vmonarch.kernels.common.launch import HOPPER_HEAD_DIM, MAX_HEAD_DIM
from vmonarch.pipelines.recipes import _FLOAT8_CAPABILITY
from vmonarch.pipelines.traits import TRAITS

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks"
_LISTED = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
FILES = [file for file in subprocess.check_output(_LISTED, text=True).splitlines() if (ROOT / file).exists()]
# The card is the Hub's, which has other files.
DOCUMENTS = {file: (ROOT / file).read_text() for file in sorted(FILES) if file.endswith(".md") and "/CARD" not in file}
# Without tables made by code, which tell what was run at their time.
PROSE = {name: re.sub(r"^<!-- table.*?^<!-- end -->", "", text, flags=re.M | re.S) for name, text in DOCUMENTS.items()}
SNIPPETS = {name: re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) for name, text in DOCUMENTS.items()}
# What needs a GPU or several processes is not run.
NOT_RUN = {"docs/engines.md", "docs/parallel.md"}
FOLDERS = ("configs", "eval", "examples", "finetune", "kernels", "pipelines", "tests", "vmonarch")
SOURCES = [ROOT / file for file in FILES if file.endswith(".py") and ROOT / file != Path(__file__).resolve()]
PAPERS = ("VMonarch", "FlashBias", "Based", "VSA", "DeepSpeed Ulysses", "Train Short, Test Long")


def anchors(document: str) -> set[str]:
    """What the headings of a document are called in a link."""
    found = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", DOCUMENTS[document], flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h).lower()).replace(" ", "-") for h in found}


def rows(document: str) -> list[list[str]]:
    """The cells of all tables."""
    return [[c.strip() for c in line.split("|")] for line in re.findall(r"^\|(.*)\|$", DOCUMENTS[document], re.M)]


def command_lines(text: str) -> list[tuple[str, str, list[str]]]:
    """(line, module, words) of every `vmonarch …` and `python -m vmonarch.… …`, whatever starts it."""
    text = re.sub(r"^```python.*?^```", "", text, flags=re.M | re.S).replace("\\\n", "")
    blocks, spans = re.findall(r"^ {4}(\S.*)$", text, re.M), re.findall(r"`([^`\n]+)`", text)
    found = []
    for line in [*blocks, *spans]:
        match = re.match(r"(?:\S+/)?(?:(?:python|accelerate|torchrun) .*?-m )?(vmonarch(?:\.\w+)*)(?= |$)(.*)", line)
        words = [word for word in shlex.split(match[2], comments=True) if word != "…"] if match else []
        # What stands in a sentence may be a command's name alone.
        if match and (line in blocks or any(word.startswith("--") for word in words)):
            found.append((line, match[1], words))
    return found


def test_command_lines_are_found():
    text = "    accelerate launch --cpu -m vmonarch.finetune --config a …  # b\n`.venv/bin/vmonarch info --x`"
    found = [("vmonarch.finetune", ["--config", "a"]), ("vmonarch", ["info", "--x"])]
    assert [line[1:] for line in command_lines(text)] == found
    assert sum(len(command_lines(text)) for text in PROSE.values()) > 40


class Parsed(BaseException):
    """Raised where a command has parsed its arguments."""


@pytest.fixture
def parsed(monkeypatch):
    """(module, words) -> the options that its command parses."""

    def stopping(parse):
        def parse_and_stop(self, args=None, namespace=None):
            raise Parsed(parse(self, args, namespace))

        return parse_and_stop

    def options(module: str, words: list[str]) -> dict:
        if module in ("vmonarch", "vmonarch.finetune"):
            words = words if module == "vmonarch" else ["finetune", *words]
            module = "vmonarch.cli"
        elif hasattr(importlib.import_module(module), "__path__"):
            module += ".__main__"
        with pytest.raises(Parsed) as stop:
            importlib.import_module(module).main(words)
        return vars(stop.value.args[0])

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, stopping(getattr(argparse.ArgumentParser, name)))
    return options


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_and_their_flags_exist(document, parsed):
    for line, module, words in command_lines(PROSE[document]):
        if words[-1:] == ["--help"]:
            continue
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                options = parsed(module, words)
        except SystemExit:
            pytest.fail(f"{line}\n{errors.getvalue()}")
        group = "finetune" if module == "vmonarch.finetune" else words[0] if words else ""
        if options.get("config"):
            assert options["config"] in preset_names(group), line
        if module == "vmonarch" and group != "bench":
            for method in [*(options.get("methods") or []), *filter(None, [options.get("attention")])]:
                # Files of the reader's are not here.
                if not re.search(r"plan=\S+\.json|adapter=\S+\.safetensors", method):
                    resolve_method(method, recipes=True)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"(?:^ {4}|`)make ([\w-]+)", PROSE[document], re.M)) <= set(targets)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_modules_and_sections_exist(document):
    text = PROSE[document]
    named = re.findall(rf"(?<![\w/.-])(?:docs|{'|'.join(FOLDERS)})/[\w./*-]*[\w*/]", text)
    named += re.findall(r"(?<![\w/.{-])[\w./*-]*\w\.(?:py|yaml|toml|log|md)\b", text)
    for name in {name.rstrip("/").removeprefix("vmonarch/") for name in named}:
        name = re.sub(r"^(\.\./)+", "", name)
        patterns = (name, f"*/{name}", f"{name}/*", f"*/{name}/*", f"configs/{name}.yaml")
        assert any(fnmatch(file, pattern) for file in FILES for pattern in patterns), name
    for name in set(re.findall(r"vmonarch(?:\.[A-Za-z_]\w*)+", text)):
        assert pkgutil.resolve_name(name) is not None
    for link, section in re.findall(r"\]\((?!\w+:)([^)\s#]*)#?([^)\s]*)\)", DOCUMENTS[document]):
        target = (ROOT / document).parent / link if link else ROOT / document
        assert target.exists(), link
        assert not section or section in anchors(os.path.relpath(target, ROOT)), f"{link}#{section}"


def test_sections_that_code_cites_exist():
    cited = 0
    for path in SOURCES:
        text = path.read_text()
        for document, heading in re.findall(r'(docs/[\w/]+\.md), "([^"]+)"', text):
            assert re.search(rf"^#+ {re.escape(heading)}$", DOCUMENTS[document], re.M), f"{path}: {document}, {heading}"
            cited += 1
        # Numbers of sections are those of a paper, which the line names.
        assert not [s for s in text.splitlines() if re.search(r"§ ?\d", s) and not any(p in s for p in PAPERS)], path
    assert cited > 10


def test_readme_is_short_and_installs_before_it_calls_a_command():
    text = DOCUMENTS["README.md"]
    assert len(text.split()) <= 1100
    assert -1 < text.find("pip install .") < text.index("\n    vmonarch ")


def test_the_api_names_what_is_public_and_activates_the_environment_before_its_commands():
    text = DOCUMENTS["docs/api.md"]
    api = text.partition("\n## Public names\n")[2].partition("\n## ")[0]
    assert set(vmonarch.__all__) - {"__version__"} <= set(re.findall(r"(\w+)[`(]", api))
    assert text.index(".venv/bin/activate") < text.index("\n    vmonarch ")


def test_the_support_matrix_is_what_the_code_supports():
    named = {row[0].split("`")[1] for row in rows("docs/families.md") if row[0].startswith("`")}
    pipelines = {name for name in named if name.endswith("Pipeline")}
    assert pipelines == {name for name, traits in TRAITS.items() if not traits.wan}
    own = {name for name, family in FAMILIES.items() if family.own}
    matrix = {row[0].strip("`"): row[1:] for row in rows("README.md") if row[0][:1] == "`" and row[0][1:-1] in FAMILIES}
    assert set(matrix) == own and named - pipelines == set(FAMILIES) - own
    assert len(named - pipelines) == 18 and "eighteen" in DOCUMENTS["docs/troubleshooting.md"]
    commands = {get_type_hints(getattr(diffusers, name).__init__)["transformer"] for name in TRAITS}
    for model in (getattr(diffusers, name) for name in own):
        _, on, refresh, parallel, command = matrix[model.__name__]
        assert on == "yes" and refresh in ("yes", "untested")
        assert (parallel == "yes") == (getattr(model, "_cp_plan", None) is not None), model
        assert (command == "no") == all(model not in (found, *get_args(found)) for found in commands), model
    text = " ".join(DOCUMENTS["docs/choose.md"].partition("\n## Which GPUs\n")[2].partition("\n## ")[0].split())
    limits = re.findall(r"head dimensions up to (\d+)", text)
    assert limits == [str(MAX_HEAD_DIM), str(HOPPER_HEAD_DIM)]
    found = ((re.search(r"\(sm_(\d+)\)$", row[0]), row) for row in rows("docs/choose.md"))
    chips = {int(number[1]): row[2] for number, row in found if number}
    assert set(chips) == {80, 86, 89, 90, 100, 120}
    assert all((float8 == "yes") == (divmod(chip, 10) >= _FLOAT8_CAPABILITY) for chip, float8 in chips.items())


def test_errors_that_troubleshooting_explains_are_in_the_code():
    # As one text: messages are written over several lines.
    code = "\n".join(path.read_text() for path in SOURCES if not path.is_relative_to(ROOT / "tests"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    messages = [row[0].strip("`") for row in rows("docs/troubleshooting.md") if row[0].startswith("`")]
    assert len(messages) > 20
    assert not [part for message in messages for part in re.split(r"\s*…\s*", message) if part not in code]


def test_every_option_is_explained_with_its_default():
    explained = {
        name
        for page in ("attention", "based")
        for row in rows(f"docs/{page}.md")
        for name in re.findall(r"`(\w+)`", row[0])
    }
    parameters = {}
    for takes_options in (BasedProcessor, FlashBiasProcessor, vmonarch_attention, VMonarchProcessor):
        parameters |= inspect.signature(takes_options).parameters
    assert {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY} <= explained
    options = {**inspect.signature(vmonarch_attention).parameters, **inspect.signature(VMonarchProcessor).parameters}
    stated = {row[0].strip("`"): row[1].strip("`") for row in rows("docs/attention.md") if row[0].strip("`") in options}
    stated = {name: ast.literal_eval(default) for name, default in stated.items() if default}
    assert len(stated) > 10 and {name: options[name].default for name in stated} == stated


@pytest.fixture
def no_hub(tiny, monkeypatch, tmp_path):
    """`from_pretrained`; models of the hub are tiny ones, videos small, and the GPU is the CPU."""

    def from_pretrained(cls, *_, **__):
        pipe = tiny.pipeline("t2v")
        pipe.transformer = tiny.transformer(attention_head_dim=16)
        return pipe

    def two_steps(self, *prompt, **options):
        return call(self, *prompt, **{"num_inference_steps": 2} | options | small)

    small = {"height": tiny.HEIGHT, "width": tiny.WIDTH, "num_frames": tiny.FRAMES}
    call, wan = diffusers.WanPipeline.__call__, diffusers.WanPipeline
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", classmethod(from_pretrained))
    monkeypatch.setattr(diffusers.DiffusionPipeline, "to", lambda self, device: self)
    monkeypatch.setattr(wan, "__call__", two_steps)
    lora = LoraConfig(r=2, target_modules=["to_q"])
    monkeypatch.setattr(wan, "load_lora_weights", lambda self, *_, **__: self.transformer.add_adapter(lora))
    config = lambda **options: EvalConfig(output_dir="evaluation", **small, steps=2, **options)
    monkeypatch.setattr(vmonarch.eval.evaluate, "EvalConfig", config)
    monkeypatch.chdir(tmp_path)
    methods, layers = {"own": {"exact": {"band": 0}}}, {"transformer": [["own"] * 2] * 2}
    Path("plan.json").write_text(json.dumps({"format": "vmonarch-plan-1", "methods": methods, "layers": layers}))
    return wan.from_pretrained


@pytest.mark.parametrize("document", [document for document, found in SNIPPETS.items() if found])
def test_snippets_run(document, tiny, no_hub):
    T, H, W = tiny.GRID
    bias = document == "docs/bias.md"
    q, k, v = torch.randn(3, 1, T * H * W, H, 8)
    q16, k16 = torch.randn(2, 1, T * H * W, H, 16)
    given = {"T": T, "H": H, "W": W, "grid": tiny.GRID, "q": q, "k": k, "v": v, "q16": q16, "k16": k16}
    given |= {"q1": q16[:, :1], "k1": k16[:, :1], "v1": v[:, :1], "decay": torch.rand(H, T, T)}
    given |= {"pipe": no_hub(), "diffusers": diffusers, "torch": torch, "vmonarch": vmonarch}
    given |= {name: torch.randn(1, 2048, 12, 2) for name in "qkv" if bias}
    for snippet in SNIPPETS[document]:
        code = compile(snippet, document, "exec")
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vmonarch"):
                assert all(hasattr(importlib.import_module(node.module), name.name) for name in node.names)
        # Float8 layers and recipes need a GPU, VBench its environment.
        if document not in NOT_RUN and not re.search("torchao|recipes|vbench", snippet):
            exec(code, given)


def test_the_commands_of_the_tutorial_make_what_it_says(monkeypatch, tmp_path, capsys):
    """As they stand but for a small video and one step; without the one that needs a model of the hub."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^ {4}(vmonarch .*)$", DOCUMENTS["docs/tutorial.md"], re.M)
    commands = [shlex.split(line)[1:] for line in blocks if "--config" not in line]
    assert [words[0] for words in commands] == ["info", "generate", "compare"]
    for words in commands:
        less = [] if words[0] == "info" else ["--steps", "1", "--num-frames", "5", "--height", "32", "--width", "32"]
        assert importlib.import_module("vmonarch.cli").main([*words, *less]) == 0
    assert {path.suffix for path in Path("outputs/generate").iterdir()} == {".mp4", ".png", ".json"}
    assert list(Path("outputs/compare").glob("*/*-side-by-side.mp4"))
    assert "| near-lossless " in capsys.readouterr().out


# Examples run as they stand, with few steps and frames, all in one process.

SHORT = ["--steps", "2", "--frames", "5"]
# Example -> its arguments, and what it has to print.
EXAMPLES = {
    "attention": ([], r"all +error   0\.0 %  mean row-KL -?0\.0000 nats\ngradients: "),
    "generate": ([*SHORT, "--output", "video.mp4"], r"^video\.mp4$"),
    "plan": ([*SHORT, "--output", "calibrated"], r"heads: \{.*\n.*diagnosis\.json\nlatents: \(1, 16, 2, 12, 20\)"),
    "residual_sharing": (SHORT, r"residuals take 0\.\d MiB(.*\n)+residual sharing: latents are "),
}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example(path, monkeypatch, tmp_path, capsys):
    words, printed = EXAMPLES[path.stem]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    runpy.run_path(str(path), run_name="__main__")
    assert re.search(printed, capsys.readouterr().out, re.M)
    assert len(path.read_text().splitlines()) <= 40
    if path.stem == "generate":
        assert (tmp_path / "video.mp4").stat().st_size > 0


# What rows of the tables of fidelity are called in their evaluations.
LABELS = {
    "another exact kernel": "full-triton",
    "tolerance 0.06": "near-lossless:refresh={tolerance: 0.06}",
    "`sol`, top 10 %": "sol:tau=null,share=0.1",
    "`sol`, tau 2": "sol:tau=2",
    "`sol`, top 10 %, ¼ exact": "sol:tau=null,share=0.1,dense_steps=0.25",
    "`sol`, tau 2, ¼ exact": "sol:tau=2,dense_steps=0.25",
    "`block-topk`, ¼ exact": "block-topk:dense_steps=0.25",
    "`reuse`, 32 % exact": "reuse:refresh=0.32",
    **{f"`{name}`, finetuned": f"{name}:adapter={name}.safetensors" for name in ("sla", "vsa")},
    "plan embedded-0.50-refined": "vmonarch:plan=embedded-0.50-refined,refresh={tolerance: 0.07}",
    "plan embedded-1.00-refined": "vmonarch:plan=embedded-1.00-refined,refresh={tolerance: 0.07}",
    **{f"fixed steps, {share} %": f"vmonarch-t1:exact=null,refresh={share / 100:g}" for share in (33, 31, 25, 20)},
}


# Their kernels between exact steps, in peers-h200.json.
KERNELS = {"full": "cudnn", "sol": "sol-tau1", "sol:tau=2": "sol-tau2", "sol:tau=null,share=0.1": "sol-top10"}
KERNELS |= {"block-topk": "vsa-fastvideo", "vmonarch-dense-start": "vmonarch"}
KERNELS |= {"vsa:adapter=vsa.safetensors": "vsa-fastvideo", "sla:adapter=sla.safetensors": "sla"}


def attention_seconds(method, rows, ms, layers):
    """Of a video: two calls for a layer in each step, by times of kernels in milliseconds."""
    exact, predicted = (
        statistics.fmean(len(row.get(f"{kind}_steps", ())) for row in rows) for kind in ("exact", "predicted")
    )
    if method in ("near-lossless", "fast"):
        # Exact steps measure and keep residuals. Those of `fast` are in eight bits after the sixth.
        late = (exact - 6) * (method == "fast")
        total = (50 - predicted) * ms["vmonarch-t1"] + (exact - late) * ms["cudnn"] + late * ms["int8"]
    else:
        other = re.sub("[:,](dense_steps|refresh)=.*", "", method)
        total = exact * ms["cudnn"] + (50 - exact) * ms[KERNELS.get(other, other)]
    return 2 * layers * total / 1000


def test_the_tables_of_fidelity_are_those_of_their_videos():
    record, bench = (json.loads((BENCHMARKS / f"{name}.json").read_text()) for name in ("fidelity", "peers-h200"))
    (_, *kernels), cells = bench["tables"][0]["header"], {row[0]: row[1:] for row in bench["tables"][0]["rows"]}
    shapes = {}
    for shape, layers, *names in (("16x28x52", 30, "s, 1.3B", "attention, s, 1.3B"), ("24x44x80:40", 40, "14B")):
        ms = [float(cell.split()[0]) for cell in cells[f"{shape} d=128 forward"]]
        of_shape = dict(zip(kernels, ms, strict=True)) | {"cached": 0, "reuse": 0}, layers
        shapes |= dict.fromkeys(names, of_shape)
    for table in record["tables"]:
        for cells in table["rows"]:
            shown = {"steps": "50"} | dict(zip(table["header"], cells, strict=True))
            method = LABELS.get(shown["method"], shown["method"].strip("`"))
            evaluation = {
                "cached": "50 steps, each computed" if "cache=null" in method else "50 steps",
                "fidelity": "peers" if shown["steps"] == "50" else "20 steps",
                "length": f"{shown.get('frames')} frames",
            }.get(table["name"], table["name"])
            rows = [item["results"][method] for item in record["evaluations"][evaluation]["items"]]
            mean = lambda name, rows=rows: statistics.fmean(row[name] for row in rows)
            predicted = statistics.fmean(len(row.get("predicted_steps", ())) for row in rows) / int(shown["steps"])
            expected = {
                "prompt score, %": f"{100 * mean('prompt_score'):.1f}",
                "computed, %": f"{100 - 100 * predicted:.1f}",
            }
            if method != "full":
                psnr = torch.tensor([float(row["psnr"]) for row in rows], dtype=torch.float64)
                p5 = f"{psnr.quantile(0.05):.1f}" if len(rows) >= 20 else "–"
                assert (shown["PSNR dB"], shown["p5"]) == (f"{psnr.mean():.1f}".replace("inf", "∞"), p5)
                expected |= {"< 27 dB": f"{(psnr < 27).sum()} of {len(psnr)}", "worst": f"{psnr.min():.1f}"}
            if shown.get("LPIPS", "–") != "–":
                expected |= {"LPIPS": f"{mean('lpips'):.3f}", "VMAF": f"{mean('vmaf'):.0f}"}
            if "permanence, %" in shown:
                expected["permanence, %"] = f"{100 * mean('permanence'):.1f}"
            if shown.get("exact, %", "–") != "–":
                shares = [100 * len(row["exact_steps"]) / int(shown["steps"]) for row in rows]
                expected["exact, %"] = f"{statistics.fmean(shares):.1f} ({min(shares):.0f}–{max(shares):.0f})"
            for name in shapes.keys() & {name for name, cell in shown.items() if cell != "–"}:
                seconds = attention_seconds(method, rows, *shapes[name])
                expected[name] = f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}"
            if rows[0]["attention_work"] is not None:
                expected["attention FLOPs, %"] = f"{100 * mean('attention_work'):.1f}"
            # Not every table has every column.
            assert {name: shown.get(name, value) for name, value in expected.items()} == expected


def test_the_tables_of_seconds_add_up_as_many_steps_of_each_kind_as_videos_had():
    record, fidelity = (json.loads((BENCHMARKS / f"{name}.json").read_text()) for name in ("e2e", "fidelity"))
    tables = {table["name"]: table for table in record["tables"]}
    measured = {}
    for case in (case for run in record["runs"] for case in run["cases"]):
        rows = {row["method"]: row for row in case["rows"] if row["mode"] == "compiled" and row.get("video_s")}
        for name in {"vmonarch-refresh", "near-lossless:refresh=0.28"} & rows.keys():
            measured[case["setting"]] = rows["full"], rows[name], rows["vmonarch"]
        if "cached" in rows:
            longer = rows["cached"]["kinds"]["exact"]["step_s"]["median"] / rows["full"]["step_s"]["median"]

    def video_seconds(setting, method, evaluation, steps=50):
        full, row, _ = measured[setting]
        results = [item["results"][method] for item in fidelity["evaluations"][evaluation]["items"]]
        exact, predicted = (
            statistics.fmean(len(row[f"{kind}_steps"]) for row in results) for kind in ("exact", "predicted")
        )
        kept, rough = (row["kinds"][kind]["step_s"]["median"] for kind in ("kept", "approximate"))
        kept = longer * full["step_s"]["median"] if method.startswith("cached") else kept
        return row["video_s"] - row["denoise_s"] + exact * kept + (steps - exact - predicted) * rough

    (frontier,) = (table for table in fidelity["tables"] if table["name"] == "frontier")
    for cells in frontier["rows"]:
        shown = dict(zip(frontier["header"], cells, strict=True))
        for setting in ("1.3b-141x448x832", "1.3b-61x720x1280"):
            seconds = video_seconds(setting, shown["method"].strip("`"), "frontier")
            assert shown[f"{setting}, s"] == f"{seconds:.1f} ({measured[setting][0]['video_s'] / seconds:.2f}×)"
    runs = (("video", 50, "proxy-peers"), ("twenty", 20, "20 steps"))
    for table, steps, evaluation, cells in ((*run, cells) for run in runs for cells in tables[run[0]]["rows"]):
        shown = dict(zip(tables[table]["header"], cells, strict=True))
        full, row, every = measured[shown["setting"]]
        seconds = {"all computed, s": row["video_s"], "VMonarch, every step, s": every["video_s"]}
        for preset in ("cached", "near-lossless", "fast"):
            seconds[f"{preset}, s"] = video_seconds(shown["setting"], preset, evaluation, steps)
        of_full = full["video_s"] - (50 - steps) * full["step_s"]["median"]
        for name in seconds.keys() & shown.keys():
            assert shown[name] == f"{seconds[name]:.1f} ({of_full / seconds[name]:.2f}×)"
        assert shown["full attention, s"] == f"{of_full:.1f}"
    at = [tables["video"]["header"].index(name) for name in tables["short"]["header"][1:]]
    assert [row[1:] for row in tables["short"]["rows"]] == [[row[i] for i in at] for row in tables["video"]["rows"]]


# Results, the site, and what names tests.

# What a results file says of itself, and the keys that say it, wherever in the file they are.
PROVENANCE = {
    "date": ("date", "created"),
    "command": ("command",),
    "hardware": ("hardware", "device_name"),
    "versions": ("versions", "packages"),
}


def values(results, keys):
    if isinstance(results, dict):
        for key, value in results.items():
            if key in keys and value:
                yield value
            yield from values(value, keys)
    elif isinstance(results, list):
        for value in results:
            yield from values(value, keys)


def test_the_tables_of_the_documents_are_those_of_the_results():
    assert not tables.outdated(ROOT), f"run python -m {tables.__name__}"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.json")), ids=lambda path: path.stem)
def test_a_results_file_says_where_it_comes_from(path):
    results = json.loads(path.read_text())
    if str(results.get("format")).startswith("vmonarch-plan-"):
        return
    missing = [name for name, keys in PROVENANCE.items() if not list(values(results, keys))]
    assert not missing and list(tables.commits(results)), f"{path.name} lacks {missing or 'a commit'}"
    for part in results.get("tables", ()):
        assert part.keys() <= {"name", "title", "header", "rows", "caption"}
        assert all(len(row) == len(part["header"]) for row in part["rows"])
        assert tables.table_text(results, part.get("name", ""))


def test_the_navigation_has_every_page_and_the_reference_every_name():
    named = re.findall(r"[\w/.-]+\.md$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2], re.M)
    # A page of a few lines leads on to another.
    pages = {file for file, text in DOCUMENTS.items() if re.match(r"(docs/.*)?[^/]+$", file) and text.count("\n") > 5}
    assert set(named) >= pages and all((ROOT / page).is_file() for page in named)
    reference = set(re.findall(r"^::: vmonarch\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.M))
    assert reference == set(vmonarch.__all__) - {"__version__"}


@pytest.mark.parametrize("repository", [None, "https://example.org/a/vmonarch"])
def test_links_of_the_readme_lead_to_the_repository_where_it_is_known(tmp_path, monkeypatch, repository):
    given = {}
    monkeypatch.setattr("setuptools.setup", lambda **arguments: given.update(arguments))
    urls = "[project.urls]\n" + (f'Repository = "{repository}"\n' if repository else "")
    (tmp_path / "pyproject.toml").write_text(urls)
    (tmp_path / "README.md").write_text("![a](docs/a.webp) [b](docs/b.md#c) [`d`](d) [e](https://e.org) [f](#f)")
    (tmp_path / "setup.py").write_text((ROOT / "setup.py").read_text())
    runpy.run_path(str(tmp_path / "setup.py"))
    links = re.findall(r"\]\(([^)]+)\)", given["long_description"])
    file, raw = (f"{repository}/blob/HEAD/", f"{repository}/raw/HEAD/") if repository else ("", "")
    assert links == [f"{raw}docs/a.webp", f"{file}docs/b.md#c", f"{file}d", "https://e.org", "#f"]


def test_the_tests_that_show_a_feature_are_there():
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("**/test_*.py"))
    named = {test for _, tests in support_matrix.FEATURES.values() for test in tests}
    assert named <= set(re.findall(r"def (test_\w+)\(", source))
