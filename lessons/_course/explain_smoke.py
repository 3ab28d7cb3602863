"""Course machinery. Puts a smoke script's failure into plain words."""

import re

from lessons._course.advice import Advice
from lessons._course.attribution import Attribution, Blame
from lessons._course.output import shortened
from lessons._course.pointers import Pointers
from lessons._course.report import SmokeReport
from lessons._course.result import Result


def explain_smoke(smoke: SmokeReport, attribution: Attribution, at: Pointers) -> Advice:
    """Explain a smoke script that failed after all tests passed."""
    if smoke.state == "differs" and smoke.divergence:
        return different_tokens(smoke, attribution, at)
    where = at.named_in(smoke.output)
    is_hung = smoke.state == "hung"  # then only a call that did not end, which the text names, is evidence
    task = attribution.of_frames(frames_in(smoke.text if is_hung else smoke.output))
    blame = Blame(task) if task else None if is_hung else attribution.likely()
    verb = "takes too long" if is_hung else "fails"
    advice = Advice(f"The tests pass, but the smoke script {verb}.", where)
    advice.lines = [smoke.text, *(f"{blame.words} ran there." for blame in [blame] if blame)]
    advice.lines += shortened(smoke.output, 1000).splitlines()
    status = "hung" if is_hung else "error"
    advice.result = Result(status, blame.task.number if blame else None, not task, got=smoke.text)
    advice.commands = at.after_red(blame)
    return advice


def different_tokens(smoke: SmokeReport, attribution: Attribution, at: Pointers) -> Advice:
    """Explain the first token that differs from Hugging Face's."""
    found, blame = smoke.divergence or {}, attribution.likely()
    lines = [
        f"First difference at new token {found['position']}: Hugging Face chose {found['expected']}, "
        f"your code {found['got']}; the two highest logits there are {found['gap']:.4f} apart.",
        str(found["where"]),
        *([f"{blame.words}, but no test saw it."] if blame else []),
    ]
    number = blame.task.number if blame else None
    expected, got = f"token {found['expected']}", f"token {found['got']}"
    result = Result("failing", number, True, f"new token {found['position']}", expected, got, str(found["where"]))
    headline = "The tests pass, but your tokens differ from Hugging Face's."
    return Advice(headline, lines=lines, commands=at.after_red(blame), result=result)


def frames_in(traceback: str) -> list[tuple[str, int]]:
    """Return the (path, line) pairs of a printed traceback."""
    return [(path, int(line)) for path, line in re.findall(r'File "([^"]+)", line (\d+)', traceback)]
