"""Course machinery. The report of a machine: whole, honest about what failed, and readable.

Protects readers who send a report from a broken file, and those who read one from a figure of a part that went wrong.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from scripts import report as command
from scripts.machine import about, kernels, page, run, schema, speed, stored
from scripts.machine.schema import Report

import pytest
import torch

from mini_engine.base.errors import UserError
from tests.course.reports import T4, machine, report

# ---------------------------------------------------------------- schema


def changed(path: str, value) -> dict:
    """Return a good report as JSON with one thing in another way; `...` removes it."""
    data = json.loads(json.dumps(asdict(report(T4))))
    *parents, last = path.split(".")
    part = data
    for name in parents:
        part = part[int(name)] if name.isdecimal() else part[name]
    if value is ...:
        del part[last]
    else:
        part[last] = value
    return data


WRONG = [
    ("version", 2), ("when", "yesterday"), ("quick", 1), ("machine", None), ("machine.cpu", "x" * 401),
    ("machine.owner", "me"), ("machine.gpu.name", ...), ("machine.cores", 2.5), ("machine.cores", True),
    ("lessons", {}), ("lessons.0.status", "perfect"), ("lessons.0.tokens", -1), ("seconds", ...),
    ("rates.matrix_gflop_s.float32", "fast"), ("kernels", [None] * 401),
]  # fmt: skip


@pytest.mark.parametrize("gpu", [None, T4])
def test_a_report_becomes_json_and_comes_back(gpu):
    one = report(gpu)
    data = json.loads(json.dumps(asdict(one)))
    assert schema.from_json(data) == one


@pytest.mark.parametrize("path, value", WRONG, ids=[f"{path}={str(value)[:12]}" for path, value in WRONG])
def test_what_is_no_report_is_refused(path, value):
    data = changed(path, value)
    with pytest.raises(ValueError) as caught:
        schema.from_json(data)
    assert path.split(".")[-1] in str(caught.value) or path.split(".")[0] in str(caught.value)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 1e999}', "[" * 9000, "\udcff", "NaN"])
def test_a_file_that_is_no_report_is_one_sentence(text, tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert command.main(["--check", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert command.main(["--check", str(tmp_path / "none.json")]) == 2


def test_a_file_is_never_half_written(tmp_path, monkeypatch):
    one = report()
    page.save(one, tmp_path)
    before = (tmp_path / "report.json").read_bytes()
    monkeypatch.setattr(Path, "write_text", half_written)
    one.seconds = 5.0
    with pytest.raises(UserError, match=r"report\.json"):
        page.save(one, tmp_path)
    assert (tmp_path / "report.json").read_bytes() == before


def half_written(self, text, **options):
    self.write_bytes(text[: len(text) // 2].encode())
    raise OSError(28, "No space left on device")


# ---------------------------------------------------------------- what is measured


@pytest.mark.parametrize("capability, dtype", [((7, 5), "float16"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_a_gpu_without_fast_bfloat16_uses_float16(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert about.half_dtype() == ("cuda", dtype)
    asked = kernels.asked()
    assert {one["dtype"] for one in asked if one["device"] == "cuda"} == {"float32", dtype}
    assert {one["device"] for one in asked if one["name"] == "triton"} == {"cuda"}
    assert {one["device"] for one in asked if one["name"] == "cpu"} == {"cpu"}


@pytest.mark.parametrize("spoil", [lambda x: x * 1.001, lambda x: x.index_fill(0, torch.tensor(3), float("nan"))])
def test_a_kernel_that_is_wrong_fails(spoil, monkeypatch):
    right = kernels.registry.load_kernel
    monkeypatch.setattr(kernels.registry, "load_kernel", lambda *of: lambda *inputs: spoil(right(*of)(*inputs)))
    found = kernels.check("attention", "torch", "float32", "cpu")
    assert found.status == "failed" and "off by" in found.why
    assert json.dumps(asdict(found), allow_nan=False), "NaN is no JSON"


def test_a_kernel_that_cannot_work_here_is_left_out(monkeypatch):
    def refuse(*of):
        raise UserError("it needs a compiler")

    monkeypatch.setattr(kernels.registry, "load_kernel", refuse)
    found = kernels.check("attention", "cpu", "float32", "cpu")
    assert (found.status, found.why) == ("left out", "it needs a compiler")


# ---------------------------------------------------------------- a run

WORKER = """
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("name") == "blockwise": os._exit(3)
    if asked.get("load") == "prefill": said = {"error": "RuntimeError: no such luck in ROOT"}
    elif asked["do"] == "kernel": said = {"answer": {"status": "ok", "error": 1e-7, "why": ""}}
    elif asked["do"] == "load": said = {"answer": LOADED}
    else: said = {"answer": {"status": "ok", "tokens_per_second": 7.0, "why": ""}}
    print(json.dumps(said), flush=True)
"""


@pytest.fixture
def made(monkeypatch, tmp_path):
    """A run whose lessons are all right and whose worker crashes in one kernel and refuses one load."""
    one = report()
    loaded = repr({"model": asdict(one.model), "rates": asdict(one.rates)})
    text = WORKER.replace("LOADED", loaded).replace("ROOT", str(run.ROOT).replace("\\", "/"))
    monkeypatch.setattr(run, "WORKER", ("-c", text))

    def of_lessons(self):
        self.report.lessons = one.lessons

    monkeypatch.setattr(run.Run, "tokens", of_lessons)
    monkeypatch.setattr(about, "describe", machine)
    return lambda *options: command.main(["--out", str(tmp_path), *options])


def read(tmp_path) -> Report:
    return schema.from_json(json.loads((tmp_path / "report.json").read_text(encoding="utf-8")))


def test_a_crash_costs_a_part_and_not_the_report(made, tmp_path, capsys):
    assert made() == 1, "the exit code says that something failed"
    found = read(tmp_path)
    assert found.finished
    lost = {one.name for one in found.kernels if one.status == "failed"}
    assert lost == {"attention: blockwise", "latents: blockwise"}
    assert all(one.why for one in found.with_status("failed"))
    by_load = {load: {one.status for one in found.speeds if one.load == load} for load in speed.LOADS}
    assert by_load == {"decode": {"ok"}, "prefill": {"failed"}, "shared beginning": {"ok"}}
    assert str(run.ROOT) not in (tmp_path / "report.json").read_text(encoding="utf-8")
    shown = capsys.readouterr()
    assert "no such luck" in " ".join(shown.out.split()) and "Traceback" not in shown.err


def test_ctrl_c_leaves_what_was_found(made, tmp_path, monkeypatch, capsys):
    def stop(self, peer, step, original=run.Run.one):
        if step.name.startswith("window: torch"):
            raise KeyboardInterrupt
        return original(self, peer, step)

    monkeypatch.setattr(run.Run, "one", stop)
    assert made() == 130
    found = read(tmp_path)
    assert not found.finished and all(one.status == "missing" for one in found.speeds)
    assert {one.why for one in found.with_status("missing")} == {run.STOPPED}
    assert [one.status for one in found.kernels if one.name == "attention: torch"] == ["ok", "ok"]
    text = capsys.readouterr().out
    assert "Not finished" in text and text.strip() == (tmp_path / "report.md").read_text(encoding="utf-8").strip()


def test_parts_without_time_are_missing_and_say_so(made, tmp_path, monkeypatch):
    monkeypatch.setattr(run.Clock, "left", property(lambda self: 0.5))
    assert made() == 0
    found = read(tmp_path)
    assert found.finished and {one.status for one in [*found.kernels, *found.speeds]} == {"missing"}
    assert all("were left" in one.why for one in found.with_status("missing"))


def test_a_lesson_s_result_becomes_a_part():
    lesson = run.pick_lessons(run.Places.find(), ["0"])[0]
    request = {"ours": [1, 2, 9], "hf": [1, 2, 3]}
    right = dict(match=True, device="cpu", requests=[request | {"ours": [1, 2, 3]}])
    assert run.of_lesson(run.Result(lesson, 0, 1.0, "", right)).status == "ok"
    wrong = run.of_lesson(run.Result(lesson, 1, 1.0, "", dict(match=False, device="cpu", requests=[request])))
    assert (wrong.status, wrong.equal_tokens, wrong.tokens) == ("failed", 2, 3) and "1 of 3 tokens" in wrong.why
    dead = run.of_lesson(run.Result(lesson, 1, 1.0, f"noise\n{run.ROOT}/x.py: no such file\n"))
    assert dead.why == "the repository/x.py: no such file"


# ---------------------------------------------------------------- which reports get a row


@pytest.mark.parametrize("one", [report(), report(T4)], ids=["cpu", "gpu"])
def test_a_whole_report_passes(one):
    assert stored.why_not(one) == ""


def test_nothing_asks_a_network(monkeypatch):
    monkeypatch.setattr(command, "make", lambda args: 0)
    assert command.main(["--quick"]) == 0
    assert os.environ["HF_HUB_OFFLINE"] == "1" and "HF_HUB_OFFLINE" in command.OFFLINE
    assert sys.modules["scripts.report"] is command
