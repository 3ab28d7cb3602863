"""Course machinery. Recorded traces: they match this engine, they are consistent, and a bug shows in them.

Protects readers from a picture of what the engine does not do, and students from `check N --trace` showing the
course's run as theirs. A trace equals a new recording byte by byte; the rules about single traces are for the day on
which one is recorded again because the engine has changed.
"""

import itertools
import json
import math
import os
import pkgutil
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from scripts import ROOT
from scripts.traces import record as recording
from scripts.traces.pictures import PLAYER, is_current, picture_path
from scripts.traces.tape import MOST_FRAMES, VERSION, Tape, ask, read_trace
from scripts.website.player_links import place_of

import pytest

from lessons._course.catalog import read_lessons
from lessons._course.places import WORK_VARIABLE, CourseError, Places
from lessons._course.trace import course_trace

PLACES = Places.find()
PATHS = {
    read_trace(path.read_text(encoding="utf-8"))["id"]: path for path in sorted(recording.LESSONS.glob("*/*.trace.js"))
}
TRACES = {name: read_trace(path.read_text(encoding="utf-8")) for name, path in PATHS.items()}
MOST_BYTES = 40_000
OURS = {"mini_engine", "l18_ranks"}  # folders of code that frames name
each_trace = pytest.mark.parametrize("name", TRACES)
DEAR = {"l9-gaps"}  # it takes as long as all others to note which functions run in a profiler
SVG = "{http://www.w3.org/2000/svg}"


def test_each_trace_has_its_recorder():
    assert set(TRACES) == set(recording.RECORDERS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in DEAR else ()) for name in TRACES]
)
def test_recorded_again_a_trace_is_the_committed_one_and_names_functions_that_have_run(name, monkeypatch):
    """A link to code that had no part in what is shown would teach something wrong."""
    if name == "l7-mailboxes":
        pytest.importorskip("fastapi", reason="needs the extra 'server'")
    ran: set[str] = set()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and OURS.intersection(Path(code.co_filename).parts):
            ran.add(f"{Path(code.co_filename).relative_to(ROOT).as_posix()}::{code.co_qualname}")

    add_frame = Tape.show

    def checked(self, say, code="", question=None, **state):
        assert code in ran or f"{code}.__init__" in ran, f"{code} has not run before the frame “{say}”"
        add_frame(self, say, code, question, **state)

    monkeypatch.setattr(Tape, "show", checked)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        tape = recording.record(name)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    assert tape.text == PATHS[name].read_text(encoding="utf-8"), (
        f"{PATHS[name].name} is not what the engine does now: python -m scripts.traces.record, and look at what changed"
    )
    assert is_current(PATHS[name], tape), "its picture was drawn from something else: python -m scripts.traces.record"


@each_trace
def test_a_trace_is_small_and_has_what_a_player_needs(name):
    trace, path = TRACES[name], PATHS[name]
    assert trace["version"] == VERSION and trace["id"] == name and trace["title"]
    assert path.as_posix().endswith("/" + trace["file"])
    assert (PLAYER / "views" / f"{trace['kind']}.js").is_file()
    assert 8 <= len(trace["frames"]) <= 30
    assert len(path.read_bytes()) < MOST_BYTES
    states = {frozenset(frame) - {"ask"} for frame in trace["frames"]}
    assert len(states) == 1, "every frame must have the same keys, so that a view never misses one"
    assert all(frame["say"].strip() for frame in trace["frames"])


@each_trace
def test_questions_have_one_right_answer_among_two_to_four(name):
    asked = [frame["ask"] for frame in TRACES[name]["frames"] if "ask" in frame]
    assert len(asked) >= 3
    assert "ask" not in TRACES[name]["frames"][0], "before the first frame there is nothing to answer from"
    for question in asked:
        options = question["options"]
        assert 2 <= len(options) <= 4 and len(set(options)) == len(options)
        assert question["right"] in range(len(options))
        assert question["question"].endswith("?") and question["why"].endswith((".", "?"))


@each_trace
def test_the_picture_is_well_formed_and_says_what_it_shows(name):
    root = ElementTree.parse(picture_path(PATHS[name])).getroot()
    assert root.tag == SVG + "svg" and root.get("role") == "img" and root.get("aria-label")
    assert not root.findall(f".//{SVG}script") and not root.findall(f".//{SVG}image")
    assert "prefers-color-scheme: dark" in root.findtext(SVG + "style")


@each_trace
def test_each_trace_is_placed_on_its_lessons_page(name):
    page = PATHS[name].parent / "README.md"
    shown = f"]({picture_path(PATHS[name]).name})]({PATHS[name].name})"
    assert shown in page.read_text(encoding="utf-8")


@each_trace
def test_each_frame_names_a_function_that_exists(name):
    for frame in TRACES[name]["frames"]:
        file, first, last = place_of(frame["code"])
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()[first - 1 : last]
        symbol = frame["code"].rpartition("::")[2].rpartition(".")[2]
        assert any(line.split("(")[0].split(":")[0].split()[-1:] == [symbol] for line in lines[:3]), frame["code"]


def frames(name):
    return TRACES[name]["frames"], TRACES[name]["scene"]


def test_beside_the_triangle_of_work_each_token_is_computed_once_and_the_counters_count():
    steps, scene = frames("l0-work")
    for step in steps:
        without, kept = step["spans"]
        number, length = len(step["answer"]), len(step["prompt"])
        assert len(without) == len(kept) == number, "both runs take the same steps"
        assert without == [[0, length + i] for i in range(number)], "without a cache a step feeds every token"
        assert kept == [[0, length], *([length + i, length + i + 1] for i in range(number - 1))][:number]
        computed = [[at for start, stop in run for at in range(start, stop)] for run in step["spans"]]
        assert step["counts"] == [len(rows) for rows in computed]
        assert step["again"] == [len(rows) - len(set(rows)) for rows in computed]
    assert number == scene["steps"] and step["again"][1] == 0 and step["counts"][0] > 7 * step["counts"][1]


def test_in_the_caches_no_more_is_used_than_reserved_and_rows_are_written_once():
    steps, scene = frames("l1-reserved")
    a_row = steps[0]["bytes"]["reserved"] // scene["rows"]
    for before, step in itertools.pairwise(steps):
        caches = [cache for cache in step["caches"] if cache]
        assert all(cache["used"] <= scene["rows"] for cache in caches)
        assert step["bytes"]["reserved"] == len(caches) * scene["rows"] * a_row
        assert step["bytes"]["used"] == sum(cache["used"] for cache in caches) * a_row <= step["bytes"]["reserved"]
        for old, cache in zip(before["caches"], step["caches"], strict=True):
            if cache and cache["wrote"]:
                start = old["used"] if old and old["name"] == cache["name"] else 0
                assert cache["wrote"] == list(range(start, cache["used"])), "a step writes the rows behind cur_len"
                assert len(cache["words"]) == cache["used"] + 1, "the chosen token is known and not written"
    waits = [step for step in steps if step["waiting"]]
    assert waits and all(None not in step["caches"] for step in waits), "D waits only while all places are reserved"
    assert all(sum(scene["rows"] - cache["used"] for cache in step["caches"]) > 12 for step in waits), (
        "and while more rows than it would write hold nothing"
    )
    kept = [step["caches"][0]["used"] for step in steps]
    assert any(now < old for old, now in itertools.pairwise(kept)), "truncate belongs into the picture"


def test_in_the_pool_each_block_is_free_or_held_by_one():
    steps, scene = frames("l2-pool")
    for step in steps:
        held = [block for request in step["requests"] for block in request["blocks"]]
        assert sorted(held + step["free"]) == list(range(scene["num_blocks"]))
        for request in step["requests"]:
            assert request["written"] <= request["slots"] == len(request["blocks"]) * scene["block_size"]
            slots = [step["slots"][block * scene["block_size"] + i] for block in request["blocks"] for i in range(4)]
            assert slots[: request["written"]] == [f"{request['name']}{i}" for i in range(request["written"])]
    assert not steps[-1]["requests"], "all requests must have finished"


def test_in_the_tables_no_request_holds_the_null_block_and_rows_name_their_blocks():
    steps, scene = frames("l3-tables")
    for step in steps:
        held = [block for table in step["tables"] for block in table["blocks"]]
        assert sorted([0, *held, *step["free"]]) == list(range(scene["num_blocks"]))
        for table, row in zip(step["tables"], step["plan"]["rows"] if step["plan"] else [], strict=False):
            assert row == table["blocks"] + [0] * (len(row) - len(table["blocks"]))
        if walk := step["walk"]:
            owned = step["tables"][walk["s"]]["blocks"]
            assert {slot // scene["block_size"] for slot, _ in walk["seen"]} <= set(owned)
            assert walk["best"] == max(score for _, score in walk["seen"])
    assert any(step["plan"] for step in steps) and any(step["walk"] for step in steps), (
        "neither may be missing from the trace"
    )


def test_along_the_walk_the_sums_are_those_of_the_parts_and_end_as_softmax_over_all():
    steps, scene = frames("l3-walk")
    rescaled = 0
    for before, step in itertools.pairwise(steps):
        added = [key for key in step["keys"] if key["part"] is not None]
        assert step["sum"] == pytest.approx(sum(key["part"] for key in added), abs=0.02)
        for key in added:
            assert key["part"] == pytest.approx(math.exp(key["score"] - step["best"]), abs=0.01)
        if step["factor"] is not None:
            rescaled += 1
            assert step["factor"] == pytest.approx(math.exp(before["best"] - step["best"]), abs=0.01)
            assert step["sums"] == pytest.approx([step["factor"] * value for value in before["sums"]], abs=0.01)
        elif step["best"] != before["best"]:
            assert not any(before["sums"]), "the maximum rises without rescaling only before anything is summed"
    read = [sum(key["score"] is not None for key in step["keys"]) for step in steps]
    assert read[-1] == len(steps[-1]["keys"]) % (scene["block_size"] * len(steps[-1]["table"]))
    assert rescaled == 2 and steps[-1]["table"] != sorted(steps[-1]["table"]), "blocks out of order, two new maxima"
    assert steps[-1]["out"] == pytest.approx([value / steps[-1]["sum"] for value in steps[-1]["sums"]], abs=0.002)
    assert steps[-1]["kernel"] == steps[-1]["out"]


def test_a_kernel_that_forgets_to_rescale_is_not_what_the_reference_computes(monkeypatch):
    from mini_engine.attention import blockwise

    source = Path(blockwise.__file__).read_text(encoding="utf-8")
    assert "sums = sums * rescale" in source
    wrong: dict = {}
    exec(source.replace("sums = sums * rescale", "sums = sums"), wrong)
    monkeypatch.setattr(blockwise, "attend_blocks", wrong["attend_blocks"])
    last = recording.record("l3-walk").frames[-1]
    assert last["kernel"] != last["out"]


def test_around_the_tree_free_held_and_cached_are_the_pool_and_counts_are_the_holders():
    steps, scene = frames("l8-tree")
    for step in steps:
        assert sum(step["sums"].values()) == scene["num_blocks"] - 1
        in_tree = [block for node in step["nodes"] for block in node["blocks"]]
        assert len(set(in_tree)) == len(in_tree)
        holders = Counter(in_tree)
        for table in step["tables"]:
            holders.update(table["blocks"])
        assert [holders[block] for block in range(scene["num_blocks"])] == step["counts"]
        assert not set(step["evicted"]) & set(in_tree)
    assert any(step["evicted"] for step in steps) and any(max(step["counts"]) > 2 for step in steps)


def test_in_the_batch_no_step_goes_over_its_budget_or_the_pool():
    steps, scene = frames("l5-timeline")
    for step in steps:
        assert sum(cell["stop"] - cell["start"] for cell in step["cells"].values() if "stop" in cell) <= scene["budget"]
        assert sum(step["held"].values()) <= scene["blocks"]
    kinds = {cell["kind"] for step in steps for cell in step["cells"].values()}
    assert kinds == {"prefill", "decode", "again", "waits", "out", "aborted"}
    done = {job["name"] for job in scene["jobs"]} - {"E"}  # whose reader leaves
    assert {name for step in steps for name in step["ended"]} == done


def test_the_logits_make_probabilities_and_the_number_falls_on_the_chosen_token():
    steps, _ = frames("l4-logits")
    for step in steps:
        rows = step["rows"]
        assert sum(row["prob"] for row in rows) + step["rest"] == pytest.approx(1, abs=0.01)
        assert all(row["prob"] == 0 for row in rows if row["logit"] is None)
        if step["chosen"] is not None:
            chosen = rows[step["chosen"]]["id"]
            start = sum(row["prob"] for row in rows if row["id"] < chosen)
            assert start - 0.01 <= step["u"] <= start + rows[step["chosen"]]["prob"] + 0.01


def test_between_the_threads_no_token_is_lost_and_the_slow_client_delays_only_itself():
    steps, scene = frames("l7-mailboxes")
    for before, step in itertools.pairwise(steps):
        for name, client, old, count, earlier in zip(
            scene["clients"], step["clients"], before["clients"], step["computed"], before["computed"], strict=True
        ):
            assert sum(client["read"]) + client["unread"] + client["waits"] == count, "a token is in one place"
            assert count - earlier == (name in step["made"]), "a step gives each answer one token at most"
            assert client["read"][: len(old["read"])] == old["read"], "what was read stays read"
            if client["status"] == "reads":
                assert client["unread"] == 0, "a client that reads leaves nothing in its socket"
        if step["step"] > before["step"]:
            quick = [name for name, one in zip("AB", before["clients"], strict=False) if one["status"] != "done"]
            assert set(quick) <= set(step["made"]), "the others get a token in every step"
        assert sum(step["held"].values()) <= scene["blocks"]
    assert steps[-1]["held"] == {} and [one["status"] for one in steps[-1]["clients"]] == ["done", "done", "gone"]


def test_a_slow_client_gets_one_large_event_and_its_abort_waits_in_the_inbox():
    steps, _ = frames("l7-mailboxes")
    slow = [step["clients"][2] for step in steps]
    merged = next(
        (old["waits"], new["unread"]) for old, new in itertools.pairwise(slow) if len(new["read"]) > len(old["read"])
    )
    assert merged[0] > 1 and merged[1] == merged[0], "what has piled up becomes one event"
    left = next(index for index, step in enumerate(steps) if ["abort", "C"] in step["inbox"])
    assert "C" in steps[left]["held"], "the event loop frees no blocks"
    assert "C" not in steps[left + 1]["held"] and "C" not in steps[left + 1]["made"], "an abort comes before the step"


def test_of_the_text_each_byte_belongs_to_one_character_and_no_stop_string_shows():
    steps, scene = frames("l6-bytes")
    for step in steps:
        num_bytes = sum(len(token["bytes"].split()) for token in step["tokens"])
        assert sum(size for _, size in step["chars"]) <= num_bytes
        text = "".join(char for char, _ in step["chars"])
        assert text.startswith(step["shown"] + step["held"])
        assert not any(step["shown"].endswith(scene["stop"][:size]) for size in range(1, len(scene["stop"]) + 1))


def forgets_its_locks(split):
    def wrong(self, num_blocks, width):
        upper = split(self, num_blocks, width)
        upper.locks = 0
        return upper

    return wrong


def pads_with_a_request_s_block(fill):
    def wrong(self, step, size):
        fill(self, step, size)
        self.slot_mapping[len(step.token_ids) : size] = 5

    return wrong


def assigns_a_new_tensor(fill):
    """Lesson 10's second pitfall: what is assigned is not in the block, so no copy moves it."""

    def wrong(self, step, size):
        self.positions = self.positions.clone()
        fill(self, step, size)

    return wrong


def reads_each_block_for_every_head(right):
    """One walk over the blocks for each head, whose sums are right."""

    import torch

    def wrong(q, q_rope, *rest):
        heads = [right(q[:, [h]], q_rope[:, [h]], *rest) for h in range(q.shape[1])]
        return torch.cat(heads, dim=1)

    return wrong


def fills_without_a_copy(_):
    """Lesson 19: buffers that are said to be complete, and hold what was in them before."""

    def wrong(self, sending, payloads):
        sending.num_filled += len(payloads)

    return wrong


COMMIT = "kv.contiguous.CachedSequence.commit"
BUGS = [  # a trace, a function of the engine, and what a bug makes of it
    ("l0-work", COMMIT, lambda _: lambda self, meta: None),
    ("l1-reserved", COMMIT, lambda _: lambda self, meta: setattr(self, "cur_len", meta.kv_len + 1)),
    ("l7-mailboxes", "engine.mailbox.merge", lambda _: lambda first, second: first),
    ("l8-tree", "kv.radix_node.Node.split", forgets_its_locks),
    ("l8-prompts", "kv.radix_node.Node.path", lambda _: lambda self: iter([self] if self.parent else [])),
    ("l9-packing", "layers.pack.interleave", lambda _: lambda rows, tiles: None),
    ("l10-capture", "gpu.graphs.DecodeBuffers.fill", pads_with_a_request_s_block),
    ("l10-capture", "gpu.graphs.DecodeBuffers.fill", assigns_a_new_tensor),
    ("l15-windows", "windows.window_table.WindowTable.slide", lambda _: lambda self, first: []),
    ("l15-windows", "windows.kept.KeptWindows.num_usable", lambda _: lambda self, blocks: len(blocks)),
    ("l16-latents", "latents.attention.attend_blocks", reads_each_block_for_every_head),
    ("l16-latents", "latents.reading.expand", lambda right: lambda c, r, *rest: right(c, 0 * r, *rest)),
    ("l17-bits", "quantized.int4_rows.quantize4", lambda right: lambda x: right(x.round())),
    ("l17-bits", "quantized.rotation.rotate", lambda _: lambda x: x),
    (
        "l18-ranks",
        "distributed.tensor_parallel.vocabulary.looked_up",
        lambda right: lambda lookup, ids, rows: lookup(ids % len(rows)),
    ),
    (
        "l18-ranks",
        "lessons.l18_ranks.one_shot.add_up",
        lambda right: lambda x, board, rank, meeting: right(x, board, rank, 1),
    ),
    ("l19-handover", "handover.sender.SendingConnector._fill", fills_without_a_copy),
    (
        "l19-handover",
        "handover.receiver.ReceivingConnector._usable",
        lambda right: lambda self, t, n: right(self, t, n + 4),
    ),
]


@pytest.mark.nightly
@pytest.mark.parametrize("name, place, bug", BUGS)
def test_a_bug_in_the_engine_shows_in_the_trace(name, place, bug, monkeypatch):
    """A recorder that computed anything itself would show what should happen instead of what does."""
    if name == "l7-mailboxes":
        pytest.importorskip("fastapi", reason="needs the extra 'server'")
    name_of_it = place if place.startswith("lessons.") else f"mini_engine.{place}"
    monkeypatch.setattr(name_of_it, bug(pkgutil.resolve_name(name_of_it)))
    told = read_trace(recording.record_whatever_happens(name).text)["frames"]
    assert [frame | {"say": ""} for frame in told] != [frame | {"say": ""} for frame in TRACES[name]["frames"]]


def test_check_says_what_is_out_of_date(tmp_path, monkeypatch, capsys):
    (tmp_path / "l6_text").mkdir()
    for path in (PATHS["l6-bytes"], picture_path(PATHS["l6-bytes"])):
        (tmp_path / "l6_text" / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(recording, "LESSONS", tmp_path)
    assert recording.main(["--check", "--only", "l6-bytes"]) == 0
    copy = tmp_path / "l6_text" / "bytes.trace.js"
    copy.write_text(copy.read_text(encoding="utf-8").replace("held back", "held up", 1), encoding="utf-8")
    assert recording.main(["--check", "--only", "l6-bytes"]) == 1
    assert "bytes.trace.js" in capsys.readouterr().out


def test_recording_code_that_never_ends_is_stopped():
    tape = Tape("x", "x.trace.js", "pool", "x")
    with pytest.raises(RuntimeError):
        for _ in range(MOST_FRAMES + 1):
            tape.show("again")


def test_a_question_without_a_wrong_option_is_not_asked():
    assert ask("Which?", 4, (4, "4"), "") is None


def check_trace(number: int, work: Path, *options: str) -> subprocess.CompletedProcess:
    """`check N --trace`, with `work` as the student's folder."""
    command = [sys.executable, "-m", "lessons", "check", str(number), "--trace", *options]
    env = os.environ | {WORK_VARIABLE: str(work)}
    return subprocess.run(command, cwd=PLACES.root, env=env, capture_output=True, encoding="utf-8", check=False)


def fill_with_the_reference(number: int, work: Path) -> Path:
    """The student's folder of a lesson, with the reference's modules in it."""
    lesson = next(lesson for lesson in read_lessons(PLACES) if lesson.number == number)
    folder = work / f"l{number}"
    folder.mkdir()
    for module in lesson.modules:
        source = PLACES.root / module
        (folder / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def traces_of(page: Path) -> dict:
    text = page.read_text(encoding="utf-8").partition("window.KV_TRACES = ")[2].partition(";</script>")[0]
    return json.loads(text)


@pytest.mark.nightly
def test_a_right_run_of_the_students_own_is_the_courses(tmp_path):
    folder = fill_with_the_reference(2, tmp_path)
    done = check_trace(2, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = traces_of(folder / "trace.html")
    assert list(shown) == ["mine"] and shown["mine"]["frames"] == TRACES["l2-pool"]["frames"]


@pytest.mark.nightly
def test_a_wrong_run_shows_what_the_students_own_code_does(tmp_path):
    folder = fill_with_the_reference(2, tmp_path)
    file = folder / "allocator.py"
    right = "self.free_blocks[cut:][::-1]"
    source = file.read_text(encoding="utf-8")
    assert right in source
    file.write_text(source.replace(right, "self.free_blocks[cut:]"), encoding="utf-8")
    done = check_trace(2, tmp_path, "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 1 and not told["equal"] and told["differs_at"] == 1
    shown = traces_of(Path(told["page"]))
    assert shown["mine"]["frames"][1]["requests"][0]["blocks"] == [1, 0]
    assert shown["course"]["frames"] == TRACES["l2-pool"]["frames"]
    assert not any("ask" in frame for frame in shown["mine"]["frames"]), "its answers would be those of another run"


@pytest.mark.nightly
def test_a_run_that_fails_is_shown_up_to_there(tmp_path):
    folder = fill_with_the_reference(6, tmp_path)
    file = folder / "detokenizer.py"
    source = file.read_text(encoding="utf-8")
    right = "        text = self.held + text\n"
    assert right in source
    bug = "        if 'U' in text:\n            raise KeyError('U')\n"
    file.write_text(source.replace(right, right + bug), encoding="utf-8")
    done = check_trace(6, tmp_path, "--no-open")
    assert done.returncode == 1
    last = traces_of(folder / "trace.html")["mine"]["frames"][-1]
    assert "KeyError" in last["say"] and last["shown"] == "A café: 5 €"


def test_a_lesson_without_a_recording_has_no_animated_picture(tmp_path):
    lesson = replace(read_lessons(PLACES)[0], folder=tmp_path)
    with pytest.raises(CourseError):
        course_trace(lesson)


@pytest.mark.nightly
def test_what_cannot_be_traced_is_said_in_a_sentence(tmp_path):
    assert len(check_trace(6, tmp_path).stderr.splitlines()) == 1
    folder = fill_with_the_reference(6, tmp_path)
    (folder / "tokenizer.py").write_text("def broken(:\n", encoding="utf-8")
    done = check_trace(6, tmp_path)
    assert done.returncode == 2 and done.stderr and "Traceback" not in done.stderr


def test_below_the_pool_a_block_falls_to_the_disk_and_comes_back():
    steps, scene = frames("l12-tiers")
    fallen, back = set(), []
    for step in steps:
        in_pool = {block["text"] for block in step["pool"] if block["held"]}
        files = {file["text"] for file in step["disk"]}
        assert len(step["pool"]) == scene["num_blocks"] - 1 and len(step["host"]) <= scene["host"]
        assert set(step["host"]) <= files, "what host memory has was handed to the disk as well"
        back += [text for text in fallen if text in in_pool]
        fallen = files - in_pool - set(step["host"])
    assert "is d" in back, "a block that only the disk had is in the pool again"


def test_behind_a_text_guesses_stand_or_go_with_their_slots():
    steps, scene = frames("l14-guesses")
    rejected = 0
    for before, step in itertools.pairwise(steps):
        words = [word for word, kind in step["text"] if kind == "new"]
        if not step["chosen"]:
            continue
        assert (
            before["fed"] == step["fed"]
            and [word for word, kind in before["text"] if kind == "guess"] == step["fed"][1:]
        )
        assert words == step["chosen"][: step["stand"]], "the step's tokens are those that its rows chose"
        assert step["chosen"][: step["stand"] - 1] == step["fed"][1 : step["stand"]], "only right drafts stand"
        rejected += len(step["fed"]) - step["stand"]
        if step["blocks"]:
            assert all(kept == used for kept, used in step["blocks"]), "a slot of a rejected draft is still counted"
            used = scene["block_size"] * (step["num_blocks"] - 1) + step["blocks"][-1][1]
            before_used = scene["block_size"] * (before["num_blocks"] - 1) + before["blocks"][-1][1]
            assert before_used - used == len(step["fed"]) - step["stand"], "each rejected draft gives up its slot"
    assert rejected > 5, "guesses of both kinds belong into the trace"
    assert any(
        step["num_blocks"] < before["num_blocks"] for before, step in itertools.pairwise(steps) if step["blocks"]
    )
    last = {step["act"]: step for step in steps}
    assert last[scene["acts"][1]]["tokens"] > 5 * last[scene["acts"][1]]["steps"]


def test_where_prompts_part_locks_are_those_of_the_requests_and_no_locked_block_is_evicted():
    steps, scene = frames("l8-prompts")
    for before, step in itertools.pairwise(steps):
        stored = [block for node in step["nodes"] for block in node["blocks"]]
        held = {block for table in step["tables"] for block in table["blocks"]}
        assert sorted({*stored, *held, *step["free"]}) == list(range(1, scene["num_blocks"]))
        assert not {*stored, *held} & set(step["free"])
        for node in step["nodes"]:
            assert node["locks"] == len(node["by"]), "a request locks every node of its path once"
            assert all(len(text) == scene["block_size"] for text in node["texts"])
        locked = {block for node in before["nodes"] if node["locks"] for block in node["blocks"]}
        gone = [ghost["block"] for ghost in step["gone"]]
        assert not set(gone) & (locked | set(stored)), "locked blocks stay, evicted ones are not in the tree"
        if step["cut"]:
            (upper,) = [node for node in step["nodes"] if node["blocks"][-1] == step["cut"]]
            assert [node["blocks"] for node in before["nodes"]] == [
                upper["blocks"] + node["blocks"] for node in step["nodes"] if node["parent"] == upper["blocks"][0]
            ]
    assert [bool(step["cut"]) for step in steps].count(True) == 1
    assert {len(step["gone"]) for step in steps} == {0, 1, 3}


def test_packed_words_lie_where_the_layout_says():
    steps, scene = frames("l9-packing")
    words = scene["inputs"] // 2
    first, last = [[word for line in step["lines"] for word in line] for step in (steps[0], steps[-2])]
    assert first == [[at // words, at % words] for at in range(len(first))]
    for at, (output, word) in enumerate(last):
        assert at == (output // 16 * words + word) * 16 + output % 16
    padded = [word for line in steps[-1]["lines"] for word in line]
    assert padded.count(None) == 15 * words and [word for word in padded if word][: len(last)] == last
    assert all(step["marked"] for step in steps[1:])


def test_the_operations_shown_are_in_order_and_all_parts_of_a_layer_are_named():
    steps, scene = frames("l9-gaps")
    for one in scene["steps"]:
        assert one["count"] == len(one["bars"]) and one["us"] > 0
        assert all(start <= after for (start, _), (after, _) in itertools.pairwise(one["bars"]))
    assert [one["count"] for one in scene["steps"]] == sorted((one["count"] for one in scene["steps"]), reverse=True)
    for step in steps:
        assert all(index < len(scene["layers"][step["layer"]]["parts"]) for index in step["lit"])
    plain, joined = ([len(bars) for _, _, bars in layer["parts"]] for layer in scene["layers"])
    assert sum(plain) > sum(joined)


@pytest.mark.nightly  # as dear as its recording
def test_a_layer_with_one_operation_more_cannot_be_told_as_it_was_measured(monkeypatch):
    from mini_engine.model.layers import RMSNorm

    plain = RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: plain(self, x) + 0)
    with pytest.raises(ValueError):
        recording.record("l9-gaps")


def test_of_the_captured_rows_requests_have_slots_of_their_own_and_padding_has_the_null_block():
    steps, scene = frames("l10-capture")
    padded = 0
    for step in steps:
        tables, size, count = step["tables"], step["size"], len(step["names"])
        starts, lengths = tables["cu_seqlens_q"], tables["seq_lens_kv"]
        for row in range(min(size, count)):
            position, blocks = tables["positions"][row], tables["block_table"][row]
            assert tables["slot_mapping"][row] == blocks[position // 4] * 4 + position % 4 > 3, "not the null block"
            assert lengths[row] == position + 1 and starts[row + 1] - starts[row] == 1
            assert all(blocks[: position // 4 + 1]) and not any(blocks[position // 4 + 1 :])
        slots = tables["slot_mapping"][:count] if size else []
        assert len(set(slots)) == len(slots), "two requests write into one slot"
        for row in range(count, size):
            padded += 1
            zeros = [tables[name][row] for name in ("token_ids", "positions", "slot_mapping", "seq_lens_kv")]
            assert zeros == [0] * 4 and not any(tables["block_table"][row]) and starts[row + 1] == starts[row]
    assert padded and {step["size"] for step in steps} == {0, 1, 2, scene["rows"]}


def test_what_is_copied_is_what_is_replayed_and_eager_steps_leave_the_buffers_alone():
    steps, scene = frames("l10-capture")
    a_row = (steps[0]["bytes"] - steps[0]["starts"][-1]) // scene["rows"]
    whole_rows = set(steps[0]["tables"]) - {"cu_seqlens_q"}  # which has a border more
    for before, step in itertools.pairwise(steps):
        assert step["starts"] == before["starts"], "a table has moved"
        if before["act"] == "fill":
            assert step["act"] == "copy"
        if step["act"] == "eager" or (before["act"], step["act"]) in (("fill", "copy"), ("copy", "replay")):
            assert step["tables"] == before["tables"]
        if step["size"]:
            assert step["copied"] == step["starts"][-1] + step["size"] * a_row
            for row in range(step["size"], scene["rows"]):
                assert all(step["tables"][name][row] == before["tables"][name][row] for name in whole_rows)
        done, earlier = (sum(dict(one["replays"]).values()) + one["eager"] for one in (step, before))
        assert done - earlier == (step["act"] in ("eager", "replay")), "a frame shows one step at most"
        if before["act"] == "replay" and step["size"]:
            chose = dict(zip(before["names"], before["chosen"], strict=False))
            fed = dict(zip(step["names"], step["fed"], strict=False))
            assert fed == {name: chose[name] for name in fed}, "what a row's logits choose is fed next"
    assert all(count for _, count in steps[-1]["replays"])


def test_behind_the_window_are_holes_and_a_request_begins_where_its_last_window_is_stored():
    steps, scene = frames("l15-windows")
    size, found = scene["block_size"], {}
    for step in steps:
        in_tree = [block for node in step["nodes"] for block in [*node["blocks"], *filter(None, node["windows"])]]
        assert len(set(in_tree)) == len(in_tree), "a block of one group is no block of the other"
        used = {*in_tree}
        for table in step["tables"]:
            first = max(0, len(table["text"]) // size * size - scene["window"] + 1) // size  # of the last whole block
            assert len(table["window"]) == len(table["full"])
            assert not any(table["window"][:first]) and all(table["window"][first:])
            assert table["first"] == max(0, len(table["text"]) - scene["window"] + 1)
            used |= {*table["full"], *table["window"][first:]}
            found.setdefault(table["name"], len(table["text"]))
        assert sorted([*step["free"], *used]) == list(range(1, scene["num_blocks"])), "the pool is one for both groups"
    assert found == {"A": 8, "B": 8, "C": 16, "D": 0, "E": 8}, "D stops at a tombstone, E finds what D has repaired"


def test_a_latent_is_written_once_and_read_once_for_all_heads():
    steps, scene = frames("l16-latents")
    last, size = steps[-1], scene["block_size"]
    assert last["reads"] == [1] * len(last["table"]), "each block is read once"
    for before, after in itertools.pairwise(steps):
        new = [a - b for a, b in zip(after["reads"], before["reads"], strict=True)]
        assert sum(new) <= 1 and (after["entry"] is None or new[after["entry"]] == 1)
    for step in steps:
        read = min(size * sum(step["reads"]), len(step["words"]))
        assert all(len(head["parts"]) == read for head in step["heads"]), "every head has scored what was read"
        assert all(max(head["parts"], default=1.0) == 1.0 for head in step["heads"]), "a largest score is among them"
    assert last["out"] == last["expanded"] and len(last["out"]) == len(last["heads"])


def test_rotated_first_a_key_uses_its_levels_and_the_score_stays():
    steps, scene = frames("l17-bits")
    rounded = [step for step in steps if step["levels"]]
    assert {step["turned"] for step in rounded} == {False, True}
    for step in rounded:
        for i, (x, back) in enumerate(zip(step["shown"], step["rounded"], strict=True)):
            width = step["levels"][i // scene["group"]][1]
            assert abs(back - x) < width / 2 + 0.03, "a number is off by half a step of its group at most"
    before, after = (max(width for _, width in step["levels"]) for step in (rounded[0], rounded[-1]))
    assert after < before / 4, "without the outlier the steps are far smaller"
    scores = steps[-1]["scores"]
    assert abs(scores["turned"] - scores["full"]) < abs(scores["plain"] - scores["full"]) / 4
    length = [sum(x * x for x in step["shown"]) for step in (steps[0], next(step for step in steps if step["turned"]))]
    assert abs(length[0] - length[1]) < 0.01 * length[0], "a rotation changes no length"
