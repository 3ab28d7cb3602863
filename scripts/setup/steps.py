"""Course machinery. Runs the steps of a setup one after another and shows their progress.

Like setup_env.py, it is written so that an old Python can parse it. All its output goes to stderr.
"""

import collections
import os
import shutil
import subprocess
import sys
import threading
import time

from scripts import ROOT


class SetupError(Exception):
    """Setup cannot continue; the message says why and what to do."""


def say(text):
    print(text, file=sys.stderr, flush=True)


class Steps:
    """Runs commands one after another, each on its own line: updated on a terminal, plain in a pipe."""

    def __init__(self, total, log):
        self.number, self.total, self.log = 0, total, log
        self.tail = collections.deque(maxlen=12)  # the last lines of the running command
        self.share = ""  # of a download

    def run(self, title, command):
        """Run one command. Raises SetupError with the end of its output if it fails."""
        self.number += 1
        self.tail.clear()
        title = f"  {self.number}/{self.total}  {title}  "
        print(title, end="", file=sys.stderr, flush=True)
        started = time.monotonic()
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=str(ROOT),
            env=pip_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        try:
            self._follow(process, title, started)
        finally:
            process.terminate()  # a no-op if it has ended
            process.wait()
        if process.returncode:
            shown = "\n".join("    " + line for line in self.tail)
            raise SetupError(f"step {self.number} failed. Its full output is in {self.log}; the last lines:\n{shown}")

    def _follow(self, process, title, started):
        """Show the elapsed time and the command's last line of output until it ends."""
        reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        reader.start()
        while reader.is_alive():
            reader.join(0.2)
            if sys.stderr.isatty():
                doing = self.tail[-1].strip() if self.tail else ""
                rewrite_line(f"{title}{time.monotonic() - started:.0f} s  {self.share}{doing}")
        process.wait()
        if sys.stderr.isatty():
            rewrite_line(title.rstrip())
        say(f"  {time.monotonic() - started:.0f} s")

    def _read(self, stream):
        """Keep output in the log and its end in `tail`; pip's raw progress ("Progress 1024 of 4096") in `share`."""
        with self.log.open("a", encoding="utf-8") as log:
            for line in stream:
                words = line.split()
                if words[:1] == ["Progress"]:
                    self.share = f"{100 * int(words[1]) // int(words[3])} % of " if words[3] != "0" else ""
                else:
                    self.share = ""
                    self.tail.append(line.rstrip())
                    log.write(line)


def rewrite_line(text):
    """Overwrite the current line with `text`."""
    width = shutil.get_terminal_size().columns - 1
    print("\r" + text[:width].ljust(width) + "\r" + text[:width], end="", file=sys.stderr, flush=True)


def pip_environment():
    """Return the caller's environment without settings that would make pip install outside .venv."""
    env = dict(os.environ)
    env.update(PIP_USER="0", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1", PYTHONUTF8="1")
    for name in ("PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX"):
        env.pop(name, None)
    return env
