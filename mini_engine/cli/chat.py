"""Lesson 6. The command `chat`: a conversation in the terminal. Ctrl-C ends an answer, not the session."""

import argparse
import sys
import time
from contextlib import closing

from mini_engine.cli.arguments import add_engine_options, add_sampling_options, interruptible, load_llm, sampling_params
from mini_engine.cli.generate import figures

HELP = """/stats   show tokens/s and KV figures after each answer, or stop showing them
/reset   forget the conversation
/help    this list
/quit    leave; Ctrl-D does too (on Windows Ctrl-Z and Enter)
Ctrl-C ends an answer and leaves the session alive."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `chat`."""
    add_engine_options(parser)
    add_sampling_options(parser, max_tokens=256)
    parser.add_argument("--system", metavar="TEXT", help="tells the model who it is, before the conversation")
    parser.add_argument("--stats", action="store_true", help="begin with /stats on")


class Session:
    """One conversation: what was said, and what the user may type besides talking."""

    def __init__(self, llm, args: argparse.Namespace) -> None:
        self.llm, self.params, self.stops = llm, sampling_params(args), args.stop
        self.system = [{"role": "system", "content": args.system}] if args.system else []
        self.messages: list[dict[str, str]] = list(self.system)
        self.show_stats = args.stats

    def take(self, line: str) -> bool:
        """Do what the user typed; False when that was to leave."""
        command = line.strip()
        if command in ("/quit", "/exit"):
            return False
        if command == "/reset":
            self.messages = list(self.system)
            print("(the conversation is forgotten)")
        elif command == "/stats":
            self.show_stats = not self.show_stats
            print(f"(figures {'on' if self.show_stats else 'off'})")
        elif command.startswith("/"):
            print(HELP)
        elif command:
            self.reply(command)
        return True

    def reply(self, text: str) -> None:
        """Answer, streaming. A message that cannot be answered is not kept."""
        from mini_engine.errors import UserError

        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            prompt_ids = self.llm.encode(messages)
            deltas = self.llm.stream(prompt_ids, self.params, self.stops)
        except UserError as error:
            print(f"({error}; /reset begins anew)")
            return
        started, answer, count, last = time.perf_counter(), "", 0, None
        with interruptible() as pressed, closing(deltas):
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
            print(f"({figures(self.llm, len(prompt_ids), count, time.perf_counter() - started)})")


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends."""
    llm = load_llm(args)
    session = Session(llm, args)
    interactive = sys.stdin.isatty()
    if interactive:
        print("Type to talk, /help for the commands.")
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
