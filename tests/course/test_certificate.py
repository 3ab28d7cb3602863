"""Course machinery. A certificate says what passed here, and --verify finds whatever is not so.

Protects students from a page that an edit of theirs made untrue, and teachers from one that was never true.
"""

import json
import re
import subprocess
from dataclasses import asdict

import pytest

from lessons._course.catalog import read_lessons
from lessons._course.certificate import Certificate, Passed, complete, digest_of
from lessons._course.certificate_page import page_of, read_data
from lessons._course.commit import commit_of
from lessons._course.places import Places
from lessons._course.progress import Progress
from lessons._course.proof import WHOLE, Proof, digests
from lessons._course.tracks import read_syllabus
from tests.course.toy import Said, Toy, check

NAME = "Ada Lovelace"


def passed(toy: Toy) -> None:
    """Set up the state after a green check of the first lesson."""
    toy.write(1, 2, 3)
    proof = Proof("2026-11-28", "unknown", [1, 2, 3], 6, 7, digests([toy.file]))
    toy.done(1, 2, 3, passed=proof.date, first_passed=proof.date, proofs={WHOLE: asdict(proof)})


def written(toy: Toy, name: str = NAME) -> dict:
    """Write a certificate and return its data."""
    said = toy.run("certificate", "--name", name)
    assert said.code == 0, said.err
    return read_data(toy.places.work / "certificate.html")[0]


def forge(toy: Toy, data: dict) -> None:
    """Write the page of `data` with a digest that matches it."""
    rest = {key: value for key, value in data.items() if key != "digest"}
    page = page_of(Certificate.parse(rest), read_lessons(toy.places), read_syllabus(toy.places, [toy.lesson]).tracks)
    (toy.places.work / "certificate.html").write_text(page, encoding="utf-8")


def verify(toy: Toy) -> Said:
    return toy.run("certificate", "--verify", str(toy.places.work / "certificate.html"))


def failing(said: Said) -> list[str]:
    """Return what fails: digest, tracks, page, or a lesson."""
    return re.findall(r"^  FAILS  ([a-z]+(?: \d+)?)", said.out, re.MULTILINE)


def one_sentence(said: Said) -> bool:
    return said.code == 2 and not said.out and said.err.count("\n") == 1 and "Traceback" not in said.err


# What is written


def test_a_certificate_holds_for_the_files_that_passed_whatever_their_line_ends(toy):
    toy.edit("lessons/tracks.toml", "[0, 1]", "[0]")
    toy.write(1, 2, 3)
    assert check(toy).passed
    data = written(toy)
    assert data["name"] == NAME and data["tracks"] == {"core": "whole"}
    [lesson] = data["lessons"]
    assert (lesson["id"], lesson["part"], lesson["proof"]["tasks"]) == ("l0_toy", "whole", [1, 2, 3])
    assert (lesson["proof"]["tests_passed"], lesson["proof"]["tests_total"]) == (6, 7), "one needs a unicorn"
    page = (toy.places.work / "certificate.html").read_text(encoding="utf-8")
    assert all(text in page for text in (f">{NAME}</h1>", ">Seats<", "3 of 3", "6 of 7", data["digest"]))
    text = toy.file.path.read_text(encoding="utf-8")
    toy.file.path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    (toy.places.work / "progress.json").unlink()
    said = verify(toy)
    assert said.code == 0 and not failing(said), "neither the line ends nor the progress file matter"
    assert "3 tasks done, 6 tests passed" in said.out


def test_only_files_that_passed_as_they_are_now_count(toy):
    assert "begin with: python -m lessons start 0" in toy.run("certificate", "--name", NAME).err
    passed(toy)
    toy.write_top("# an afterthought")
    said = toy.run("certificate", "--name", NAME)
    assert one_sentence(said) and "seats.py has changed since" in said.err
    toy.write_wrong("[:n], self.free[n:]", "[-n:], self.free[:-n]")
    check(toy)
    assert "not in its last check" in toy.run("certificate", "--name", NAME).err
    toy.done(1, 2, 3, passed="2026-11-28")
    assert "no record says with which files" in toy.run("certificate", "--name", NAME).err
    assert not (toy.places.work / "certificate.html").exists()


def test_a_core_is_certified_as_such(toy):
    toy.edit("lessons/l0_toy/lesson.toml", "[tasks.3]", "[tasks.3]\nmore = true")
    toy.write(1, 2)
    assert check(toy, core=True).report.core_passed
    data = written(toy)
    [lesson] = data["lessons"]
    assert (lesson["part"], lesson["proof"]["tasks"], lesson["proof"]["tests_total"]) == ("core", [1, 2], 6)
    assert verify(toy).code == 0
    forge(toy, data | {"lessons": [lesson | {"part": "whole"}]})
    assert failing(verify(toy)) == ["lesson 0"]
    toy.write(1, 2, 3)
    check(toy, core=True)
    check(toy)
    assert written(toy)["lessons"][0]["part"] == "whole", "the larger part of what passed with these files"


def test_a_file_that_is_saved_during_its_check_proves_nothing(toy):
    toy.write(1, 2, 3)
    later = toy.file.path.with_suffix(".later")
    later.write_text(toy.file.path.read_text(encoding="utf-8") + "# saved again\n", encoding="utf-8")
    verdict = check(toy, watcher=lambda event: later.exists() and later.replace(toy.file.path))
    assert verdict.passed and not Progress(toy.places.work).entry(toy.lesson).proofs


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("</script><b>&amp;", "&lt;/script&gt;&lt;b&gt;&amp;amp;"),
        ("  Ju\u0308rgen\tGroß ", "J\u00fcrgen Groß"),
        ("$name ${x}", "$name ${x}"),
        ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u200c\u062e"),
    ],
)
def test_a_name_is_text_and_nothing_else(toy, name, shown):
    passed(toy)
    written(toy, name)
    data, page = read_data(toy.places.work / "certificate.html")
    assert data["digest"] == digest_of(data) and f'dir="auto">{shown}</h1>' in page


@pytest.mark.parametrize("name", ["", " \t", "x" * 101, "a\x00b", "a\u202eb", "a\ud800"])
def test_a_name_that_cannot_be_printed_is_refused(toy, name):
    passed(toy)
    assert one_sentence(toy.run("certificate", "--name", name))


def test_no_other_file_is_overwritten(toy):
    passed(toy)
    source = toy.file.path.read_text(encoding="utf-8")
    assert one_sentence(toy.run("certificate", "--name", NAME, "--out", str(toy.file.path)))
    assert toy.file.path.read_text(encoding="utf-8") == source
    assert one_sentence(toy.run("certificate", "--name", NAME, "--out", str(toy.places.work)))


# What is verified


def test_whatever_is_changed_afterwards_is_found(toy):
    passed(toy)
    data = written(toy)
    file = toy.places.work / "certificate.html"
    page = file.read_text(encoding="utf-8")
    file.write_text(page.replace(f"{NAME}</h1>", "Bob</h1>"), encoding="utf-8")
    assert failing(verify(toy)) == ["page"]
    file.write_text(page.replace(NAME, "Bob"), encoding="utf-8")
    assert "digest" in failing(verify(toy))
    file.write_text(page.replace('"number": 0', '"number": 1'), encoding="utf-8")
    assert "digest" in failing(verify(toy))
    file.write_text(json.dumps(data | {"name": "Bob"}), encoding="utf-8")
    assert failing(verify(toy)) == ["digest"], "the data alone, as --json prints it"
    file.write_text(page, encoding="utf-8")
    toy.write_top("# an afterthought")
    said = verify(toy)
    assert said.code == 1 and failing(said) == ["lesson 0"] and "l0/seats.py is not the certified file" in said.out


def test_claims_that_were_never_true_fail_though_their_digest_is_right(toy):
    passed(toy)
    data = written(toy)
    forge(toy, data | {"tracks": {"core": "whole", "speed": "whole"}})
    assert failing(verify(toy)) == ["tracks"]
    [lesson] = data["lessons"]
    forge(toy, data | {"lessons": [lesson, lesson | {"number": 7, "id": "l7_unheard_of"}]})
    assert failing(verify(toy)) == ["lesson 7"]
    toy.write_wrong("[:n], self.free[n:]", "[-n:], self.free[:-n]")
    proof = lesson["proof"] | {"files": digests([toy.file])}
    forge(toy, data | {"lessons": [lesson | {"proof": proof}]})
    said = verify(toy)
    assert said.code == 1 and failing(said) == ["lesson 0"]
    assert "Task 2" in said.out and "the lowest free seats go first" in said.out


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b"[]", b"{}", b"[" * 100_000, b'<script type="application/json" id="certificate">{'],
)
def test_a_file_that_is_no_certificate_is_refused_in_a_sentence(toy, content):
    toy.places.work.mkdir()
    (toy.places.work / "certificate.html").write_bytes(content)
    assert one_sentence(verify(toy))


@pytest.mark.parametrize(
    "change",
    [{"name": 1}, {"format": 2}, {"tracks": []}, {"lessons": []}, {"lessons": [1]}, {"lessons": "twice"}],
    ids=str,
)
def test_data_that_no_certificate_has_is_refused_in_a_sentence(toy, change):
    passed(toy)
    data = written(toy)
    data |= {"lessons": data["lessons"] * 2} if change == {"lessons": "twice"} else change
    (toy.places.work / "certificate.html").write_text(json.dumps(data), encoding="utf-8")
    assert one_sentence(verify(toy))


def test_a_file_or_folder_that_is_not_there_is_named(toy):
    passed(toy)
    written(toy)
    assert one_sentence(toy.run("certificate", "--verify", str(toy.places.work / "none.html")))
    file = str(toy.places.work / "certificate.html")
    assert one_sentence(toy.run("certificate", "--verify", file, "--work", str(toy.places.work / "none")))
    said = toy.run("certificate", "--verify", file, "--work", str(toy.places.root), "--json")
    assert said.code == 0 and json.loads(said.out)["holds"], "a folder that contains work"


def test_the_commit_is_the_course_s_own(tmp_path):
    course = tmp_path / "lessons"
    course.mkdir()
    (course / "page.md").write_text("a page", encoding="utf-8")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    assert re.fullmatch("[0-9a-f]{40}", commit_of(tmp_path))
    assert commit_of(course) == "unknown", "the outer repository's says nothing about a copy in it"
    (course / "page.md").write_text("another page", encoding="utf-8")
    assert commit_of(tmp_path).endswith("+changes")


# What is printed


@pytest.mark.parametrize("name", [NAME, "W" * 100], ids=["short", "long"])
def test_all_lessons_print_on_one_sheet(tmp_path, browser, name):
    places = Places.find()
    lessons = read_lessons(places)
    tracks = read_syllabus(places, lessons).tracks
    proof = Proof("2026-11-28", "f" * 40 + "+changes", [1, 2, 3, 4, 5, 6, 7, 8], 100, 100, {})
    found = [Passed(one.number, one.id, WHOLE, proof, True) for one in lessons]
    whole = Certificate(name, "2026-11-28", "0.2.0", proof.commit, complete(tracks, found), found)
    file = tmp_path / "certificate.html"
    file.write_text(page_of(whole, lessons, tracks), encoding="utf-8")
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto(file.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for size in ("A4", "Letter"):
        assert len(re.findall(rb"/Type\s*/Page\b", page.pdf(format=size))) == 1
    page.close()
