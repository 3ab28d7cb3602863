"""Lesson 6. The command `chat`: a conversation in the terminal. Ctrl-C stops an answer, not the session."""

import argparse
import signal
import sys
import time

from mini_engine.base.signals import noting
from mini_engine.cli.arguments import add_answer_options, load_llm, sampling_params
from mini_engine.cli.generate import figures

HELP = """/stats   turn tokens/s and KV figures after each answer on or off
/reset   clear the conversation
/help    show this list
/quit    leave; Ctrl-D does too (on Windows Ctrl-Z and Enter)
Ctrl-C stops an answer and keeps the session open."""
SESSION = "chat"  # its name for the cache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `chat`."""
    add_answer_options(parser, max_tokens=256)
    parser.add_argument("--system", metavar="TEXT", help="the system message that opens the conversation")
    parser.add_argument("--stats", action="store_true", help="start with /stats on")


class Session:
    """One conversation and its /commands."""

    def __init__(self, llm, args: argparse.Namespace) -> None:
        self.llm, self.params = llm, sampling_params(args, llm.engine.config.sampling)
        self.variables = args.chat_template_kwargs
        self.system = [{"role": "system", "content": args.system}] if args.system else []
        self.messages: list[dict[str, str]] = list(self.system)
        self.show_stats = args.stats

    def take(self, line: str) -> bool:
        """Carry out one line of input. Returns False if the user wants to leave."""
        command = line.strip()
        if command in ("/quit", "/exit"):
            return False
        if command == "/reset":
            self.messages = list(self.system)
            self.llm.close_session(SESSION)
            print("(conversation cleared)")
        elif command == "/stats":
            self.show_stats = not self.show_stats
            print(f"(figures {'on' if self.show_stats else 'off'})")
        elif command.startswith("/"):
            print(HELP)
        elif command:
            self.reply(command)
        return True

    def reply(self, text: str) -> None:
        """Stream an answer. A message that cannot be answered is dropped from the conversation."""
        from mini_engine.base.errors import UserError
        from mini_engine.engine.answer import TextDelta

        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            deltas = self.llm.stream(messages, self.params, session_id=SESSION, chat_template_kwargs=self.variables)
        except UserError as error:
            print(f"({error}; /reset starts over)")
            return
        started, answer, count, last = time.perf_counter(), "", 0, TextDelta("", [])
        with noting(signal.SIGINT, twice=KeyboardInterrupt) as pressed, deltas:
            for last in deltas:
                print(last.text, end="", flush=True)
                answer, count = answer + last.text, count + len(last.token_ids)
                if pressed():
                    break
        print(" (stopped)" if last.finish_reason is None else "")
        if last.error:
            print(f"(the engine failed: {last.error})")
            return
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        if self.show_stats:
            print(f"({figures(self.llm, len(deltas.request.prompt_ids), count, time.perf_counter() - started)})")


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends."""
    with load_llm(args) as llm:
        return talk(Session(llm, args))


def talk(session: Session) -> int:
    """Carry out each line of input."""
    interactive = sys.stdin.isatty()
    if interactive:
        print("Type a message, or /help for the commands.")
    while True:
        try:
            line = input("you> " if interactive else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D leaves)")
            continue
        if not session.take(line):
            return 0
