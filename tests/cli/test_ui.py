"""`vmonarch ui`: bad input is said at its field, videos are those of `generate`, and no other file can be had."""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vmonarch.configs import InputError, preset_names
from vmonarch.configs.methods import recipe_names
from vmonarch.eval.similarity import similarity
from vmonarch.pipelines.config import build_config
from vmonarch.pipelines.generation import GenerateConfig, generate
from vmonarch.pipelines.records import load_record

ui = pytest.importorskip("vmonarch.eval.ui", reason="needs the extra ui")

PROMPT = "a red circle moving right"
VALUES = {"prompts": PROMPT, "attention": "vmonarch", "seeds": "3", "steps": "2", "guidance": "", "width": "48",
          "height": "32", "num_frames": "9", "negative_prompt": "", "compare": True}  # fmt: skip


class Visitor:
    """A browser's requests, in a session of their own."""

    def __init__(self, server: Any, model: Path) -> None:
        self.address, self.values = server.socket.getsockname()[:2], {**VALUES, "model": str(model)}
        self.session = os.urandom(4).hex()
        # By what they take and change: the page names none of its events.
        events = json.loads(self.ask("GET", "/config")[1])["dependencies"]
        self.run = next(event["id"] for event in events if len(event["inputs"]) == len(self.values))
        self.stop = next(event["id"] for event in events if not event["inputs"] and event["outputs"])

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
        """Status and contents of the answer to a request for exactly this path."""
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()

    def start(self, **values: object) -> tuple[int, Any]:
        """Ask for a video with the fields' usual values but for `values`."""
        data = [{**self.values, **values}[name] for name in (*ui.FIELDS, "compare")]
        body = {"fn_index": self.run, "data": data, "session_hash": self.session}
        status, answer = self.ask("POST", "/gradio_api/queue/join", body)
        return status, json.loads(answer)

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the page is told from then on, until the video is there."""
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        connection.request("GET", f"/gradio_api/queue/data?session_hash={self.session}")
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])

    def results(self, **values: object) -> list[tuple[str, str]]:
        """The result and the status that a request shows, one after the other."""
        assert self.start(**values)[0] == 200
        shown = []
        for message in self.messages():
            if message["msg"] == "process_generating":
                shown.append(message["output"]["data"])
            if message["msg"] == "process_completed":
                break
        # Later ones come as differences.
        return shown

    def cancel(self) -> None:
        body = {"fn_index": self.stop, "data": [], "session_hash": self.session}
        assert self.ask("POST", "/gradio_api/run/predict", body)[0] == 200


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A page with the tiny model, at the host that is the default."""
    folder = tmp_path_factory.mktemp("ui") / "videos"
    server = ui.PageServer(ui.PageConfig(models=(str(tiny_model),), output_dir=str(folder), device="cpu", port=0))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.should_exit = True
    thread.join()


@pytest.fixture
def visitor(server: Any, tiny_model: Path) -> Visitor:
    return Visitor(server, tiny_model)


def files(server: Any) -> list[str]:
    return sorted(os.listdir(server.studio.output))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("prompts", "", "Must not be empty"),
        ("attention", "stack-fast", "'float8' needs"),
        ("prompts", "a " * 600, "at most 512 tokens"),
        ("seeds", "-1", "Must lie between 0 and 2^63 - 1, got -1"),
        ("seeds", "9223372036854775808", "Must lie between 0 and 2^63 - 1, got 9223372036854775808"),
        ("seeds", "x", "Must be an integer, got 'x'"),
        ("steps", "0", "at least 1"),
        ("guidance", "much", "Must be a number"),
        ("width", "100", "nearest: 96 or 112"),
        ("num_frames", "10", "nearest: 9 or 13"),
        ("model", "/no/such/folder", "there is none '/no/such/folder'"),
        ("model", "/etc", "model_index.json"),
    ],
)
def test_bad_input_is_said_at_its_field(visitor, field, value, said):
    status, answer = visitor.start(**{field: value})
    assert status == 422
    wrong = {
        name: found["message"]
        for name, found in zip(ui.FIELDS, answer["detail"], strict=False)
        if not found["is_valid"]
    }
    assert list(wrong) == [field]
    assert said in wrong[field]


def test_the_page_offers_only_given_models_to_other_machines(tiny_model, tmp_path):
    studio = ui.Studio.__new__(ui.Studio)
    studio.config, studio.folders = ui.PageConfig(host="0.0.0.0"), {"embedded": None}
    with pytest.raises(InputError, match="must be one of embedded, got"):
        studio.folder(str(tiny_model))


def test_a_request_gives_two_videos_with_records_and_how_close_they_are(server, visitor):
    before = files(server)
    results = visitor.results()
    new = [name for name in files(server) if name not in before]
    assert [name.rpartition(".")[2] for name in new] == ["json", "mp4", "png"] * 2
    assert all(not name.startswith(".") for name in new)
    html = json.dumps(results)
    videos = []
    for name, method in zip(new[::3], ("vmonarch", "full"), strict=True):
        assert name in html
        path = server.studio.output / name
        assert visitor.ask("GET", f"/outputs/{name}") == (200, path.read_bytes())
        recorded = load_record(str(path))
        assert recorded.values["attention"]["label"] == method and recorded.seeds == (3,)
        config = build_config(GenerateConfig, recorded.values)
        videos += generate(config, recorded=recorded, keep_frames=True)
        assert videos[-1].reproduced
    near = similarity(videos[0].frames, videos[1].frames)
    assert f"{near.psnr:.1f} dB" in html and f"{near.ssim:.4f}" in html
    for video in videos:
        for path in (video.video, video.contact_sheet, video.record_path):
            path.unlink()


def test_without_the_comparison_there_is_one_video(server, visitor):
    before = files(server)
    visitor.results(compare=False)
    assert len(files(server)) == len(before) + 3


def test_a_recipe_compiles_blocks_once_although_they_are_watched(server, visitor, tiny_model, monkeypatch):
    before, compile, graphs = files(server), torch.compile, []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda function, **given: compile(function, **given | {"backend": backend}))
    shown = json.dumps(visitor.results(attention="stock"))
    assert graphs and "vm-error" not in shown and "PSNR" in shown
    once = len(graphs)
    visitor.cancel()
    Visitor(server, tiny_model).results(attention="stock", compare=False)
    assert len(graphs) == once
    made = [
        load_record(str(server.studio.output / name))
        for name in files(server)
        if name not in before and ".json" in name
    ]
    assert [record.values["attention"]["label"] for record in made] == ["stock", "full", "stock"]


def test_cancelling_stops_the_sampling_and_the_next_visitor_has_the_turn(server, visitor, tiny_model):
    before = files(server)
    assert visitor.start(steps="1000")[0] == 200
    # The page is not told of every step.
    assert any(re.search(r"step \d+ of 1000", json.dumps(message)) for message in visitor.messages())
    other = Visitor(server, tiny_model)
    assert other.start(compare=False)[0] == 200
    visitor.cancel()
    told = [message["msg"] for message in other.messages() if message["msg"] != "heartbeat"]
    assert "process_completed" in told
    assert len(files(server)) == len(before) + 3, "there is only the other visitor's video"


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/file={model}/model_index.json",
        "/gradio_api/file={source}/__init__.py",
        "/gradio_api/file=http://127.0.0.1/",
        "/gradio_api/proxy=http://127.0.0.1/",
        "/outputs/../../../../../../../../etc/passwd",
        "/outputs/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/outputs//etc/passwd",
        "/outputs/link",
        "/static/../../../../../../../../etc/passwd",
        "/openapi.json",
        "/gradio_api/info",
    ],
)
def test_no_file_but_the_outputs_is_served(server, visitor, tiny_model, path):
    link = server.studio.output / "link"
    link.symlink_to("/etc/passwd")
    try:
        status, answer = visitor.ask("GET", path.format(model=tiny_model, source=Path(ui.__file__).parents[1]))
    finally:
        link.unlink()
    assert status >= 400 and b"root:" not in answer


def test_nothing_can_be_uploaded_or_asked_for_by_other_sites(visitor):
    assert visitor.ask("GET", "/")[0] == 200
    assert visitor.ask("POST", "/gradio_api/upload")[0] == 404
    assert visitor.ask("GET", "/", Host="example.com")[0] == 400
    for origin in ("http://example.com", "null", "file://"):
        assert visitor.ask("GET", "/", Origin=origin)[0] == 404
    assert visitor.ask("GET", "/", Origin="http://{}:{}".format(*visitor.address))[0] == 200


def test_the_address_of_this_machine_may_be_one_of_ipv6(visitor):
    host = f"[::1]:{visitor.address[1]}"
    assert visitor.ask("GET", "/", Host=host, Origin=f"http://{host}")[0] == 200
    assert visitor.ask("GET", "/", Host="[::2]")[0] == 400


def test_it_listens_on_this_machine_alone(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert server.url.startswith("http://127.0.0.1:")


def test_the_page_needs_nothing_from_elsewhere(visitor):
    _, page = visitor.ask("GET", "/")
    loaded = re.findall(rb'<(?:script|link|img)[^>]*?(?:src|href)="(https?:[^"]*)"', page)
    assert not loaded
    config = json.loads(visitor.ask("GET", "/config")[1])
    assert not config["analytics_enabled"] and not config.get("stylesheets")


def test_the_methods_are_named_settings():
    assert next(iter(ui.METHODS)) == "near-lossless"
    assert set(ui.METHODS) <= {*preset_names("attention"), *recipe_names()}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "no/such/model/folder"], "--model must be 'embedded', a folder of a pipeline or a hub id"),
        (["--output-dir", "."], "--output-dir must not hold"),
        (["--port", "70000"], "--port must lie between 0 and 65535"),
        (["--host", "192.0.2.1"], "cannot be had"),
        (["--device", "gpu"], "--device must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_what_cannot_be_served_ends_the_command(cli, words, said):
    code, out, err = cli("ui", "--port", 0, *words, tiny=False)
    assert (code, out) == (2, "") and said in err


def test_without_the_extra_the_command_says_how_to_install_it(cli, monkeypatch):
    monkeypatch.delitem(sys.modules, "vmonarch.eval.ui")
    monkeypatch.setitem(sys.modules, "gradio", None)
    code, _, err = cli("ui", tiny=False)
    assert code == 1 and "pip install 'vmonarch[ui]'" in err
