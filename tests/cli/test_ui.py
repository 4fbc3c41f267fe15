"""`vmonarch ui`: bad input is said with its field, videos are those of `generate`, and no other file can be had."""

from __future__ import annotations

import http.client
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vmonarch.configs import preset_names
from vmonarch.pipelines import recipes
from vmonarch.pipelines.outputs import load_record

ui = pytest.importorskip("vmonarch.eval.ui", reason="needs the extra ui")

VALUES = {"prompts": "a red circle moving right", "image": None, "attention": "near-lossless", "seeds": 3,
          "size": "48×32", "num_frames": 9, "steps": 2, "guidance": None, "negative_prompt": ""}  # fmt: skip


class Visitor:
    """A browser's requests, in a session of their own."""

    def __init__(self, page: Any) -> None:
        self.address = "127.0.0.1", page.server_port
        self.session = os.urandom(4).hex()
        # By what they take and change: the page names none of its events.
        events = json.loads(self.ask("GET", "/config")[1])["dependencies"]
        self.run = next(event["id"] for event in events if len(event["inputs"]) == len(VALUES))
        (self.stop,) = [event["id"] for event in events if not event["inputs"] and len(event["outputs"]) == 1
                        and event["targets"][0][1] == "click"]  # fmt: skip

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
        """Status and contents of the answer to a request for exactly this path."""
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()

    def start(self, **values: object) -> tuple[int, Any]:
        """Ask for a video with the fields' usual values but for `values`."""
        data = [{**VALUES, **values}[name] for name in ui.FIELDS]
        body = {"fn_index": self.run, "data": data, "session_hash": self.session}
        status, answer = self.ask("POST", "/gradio_api/queue/join", body)
        return status, json.loads(answer)

    def messages(self) -> Iterator[str]:
        """What the page is told from then on, until the video is there."""
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        connection.request("GET", f"/gradio_api/queue/data?session_hash={self.session}")
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                yield line.decode()
            if b"process_completed" in line:
                break

    def results(self, **values: object) -> str:
        """All that the page is told of a request."""
        assert self.start(**values)[0] == 200
        return "".join(self.messages())

    def cancel(self) -> None:
        body = {"fn_index": self.stop, "data": [], "session_hash": self.session}
        assert self.ask("POST", "/gradio_api/run/predict", body)[0] == 200


@pytest.fixture(scope="module")
def studio(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("ui") / "videos"
    return ui.Studio(str(tiny_model), output_dir=str(folder), device="cpu")


@pytest.fixture(scope="module")
def page(studio: Any) -> Iterator[Any]:
    """A page with the tiny model, at the host that is the default."""
    page, _ = ui.launch(studio, port=0)
    yield page
    page.close(verbose=False)


@pytest.fixture
def visitor(page: Any) -> Visitor:
    return Visitor(page)


def files(studio: Any) -> list[str]:
    return sorted(os.listdir(studio.output))


def test_a_request_gives_a_video_with_its_record_and_the_page_tells_what_is_done(studio, visitor):
    before = files(studio)
    told = visitor.results()
    new = [name for name in files(studio) if name not in before]
    assert [name.rpartition(".")[2] for name in new] == ["json", "mp4", "png"] and not new[0].startswith(".")
    for stage in ("Loading the model", "video 1 of 1", "Made in"):
        assert stage in told
    for name in new:
        assert name in told
        assert visitor.ask("GET", f"/gradio_api/file={studio.output / name}") == (
            200,
            (studio.output / name).read_bytes(),
        )
    values = load_record(str(studio.output / new[0]))["config"]
    assert (values["attention"]["label"], values["seeds"], values["width"]) == ("near-lossless", [3], 48)
    # A server that starts later shows it, too.
    assert new[1] in ui.Studio(studio.model, str(studio.output), device="cpu").gallery()
    # Now that the model is there, its tokeniser can count.
    assert "Prompt must have at most 512 tokens" in visitor.results(prompts="a " * 600)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("prompts", "", "Prompt must not be empty"),
        ("seeds", -1, "Seed must be in [0, 9223372036854775807], got -1"),
        ("size", "100×32", "nearest: 96 or 112"),
        ("size", "wide", "Size must be WIDTH×HEIGHT"),
        ("num_frames", 10, "nearest: 9 or 13"),
    ],
)
def test_bad_input_is_said_with_its_field(visitor, field, value, said):
    told = json.loads(visitor.results(**{field: value}).rpartition("data: ")[2])
    assert said in str(told["output"]["data"])


def test_cancelling_stops_the_sampling_frees_memory_and_the_next_visitor_has_the_turn(
    studio, visitor, page, monkeypatch
):
    before, freed, apply = files(studio), [], recipes.apply
    monkeypatch.setattr(
        recipes, "apply", lambda pipe, method, **how: freed.append(method) or apply(pipe, method, **how)
    )
    assert visitor.start(steps=300)[0] == 200
    # The page is not told of every step.
    assert any('"length": 300' in message or '"length":300' in message for message in visitor.messages())
    other = Visitor(page)
    assert other.start()[0] == 200
    visitor.cancel()
    assert "Made in" in "".join(other.messages())
    assert len(files(studio)) == len(before) + 3, "there is only the other visitor's video"
    assert freed.count("full") == 2, "residuals are let go of after each"


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/file={model}/model_index.json",
        "/gradio_api/file=http://127.0.0.1/",
        "/static/../../../../../../../../etc/passwd",
        "/openapi.json",
        "/gradio_api/info",
    ],
)
def test_no_file_but_the_outputs_is_served(studio, visitor, tiny_model, path):
    there = {"output": studio.output, "model": tiny_model}
    status, answer = visitor.ask("GET", path.format(**there))
    assert status >= 400 and b"root:" not in answer


def test_nothing_can_be_asked_for_by_other_sites(visitor):
    port = visitor.address[1]
    assert visitor.ask("GET", "/")[0] == 200
    for host in ("example.com", "[::2]"):
        assert visitor.ask("GET", "/", Host=host)[0] == 400
    for origin in ("http://example.com", "null", "file://"):
        assert visitor.ask("GET", "/", Origin=origin)[0] == 404
    # The address of this machine may be one of IPv6.
    for host in (f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert visitor.ask("GET", "/", Host=host, Origin=f"http://{host}")[0] == 200


def test_the_page_listens_on_this_machine_alone_and_needs_nothing_from_elsewhere(page, visitor):
    assert page.local_url.startswith("http://127.0.0.1:")
    assert ui.is_local("127.0.0.1") and ui.is_local("::1") and not ui.is_local("0.0.0.0")
    loaded = re.findall(rb'<(?:script|link|img)[^>]*?(?:src|href)="(https?:[^"]*)"', visitor.ask("GET", "/")[1])
    assert not loaded
    config = json.loads(visitor.ask("GET", "/config")[1])
    assert not config["analytics_enabled"] and not config.get("stylesheets")


def test_what_cannot_run_here_is_not_offered(monkeypatch):
    known = {*preset_names("attention"), *preset_names("recipes")}
    assert {name for pair in ui.PRESETS.values() for name in pair} <= known
    here = ui.offered_presets(torch.device("cpu"))
    assert list(here.values()) == ["near-lossless", "fast", "full"]
    monkeypatch.setattr(recipes, "check_linears", lambda linears, device: None)
    assert set(ui.offered_presets(torch.device("cuda")).values()) <= set(preset_names("recipes"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "no/such/model/folder"], "--model must be 'embedded', a folder of a pipeline or a hub id"),
        (["--output-dir", "."], "--output-dir must not hold"),
        (["--port", "70000"], "--port 70000 of 127.0.0.1 cannot be had"),
        (["--host", "192.0.2.1"], "--host must be an address of this machine, got '192.0.2.1'"),
        # An address of IPv6, whose only fault is the port.
        (["--host", "::1", "--port", "70000"], "port must be 0-65535"),
        (["--device", "gpu"], "--device must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_what_cannot_be_served_ends_the_command(cli, words, said):
    code, out, err = cli("ui", "--port", 0, *words, tiny=False)
    assert (code, out) == (2, "") and said in err
