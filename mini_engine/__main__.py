"""Lesson 6. The engine's commands: generate text, chat, serve over HTTP (lesson 7), look after kept KV (lesson 12)."""

import atexit
import gc
import importlib
import sys
from collections.abc import Sequence

from mini_engine.cli.parser import OneLineParser, description, guard

COMMANDS = {
    "generate": ("mini_engine.cli.generate", "continue a text"),
    "chat": ("mini_engine.cli.chat", "talk to the model in the terminal"),
    "serve": ("mini_engine.cli.serve", "answer over HTTP with OpenAI's API"),
    "pool": ("mini_engine.cli.pool", "say what a model's KV cache costs, from its config.json"),
    "cache": ("mini_engine.cli.cache", "list, verify or clear KV that was kept on disk"),
}


def main(argv: Sequence[str] | None = None, prog: str = "mini-engine") -> int:
    """Run one command and return the process's exit code. prog: the program name shown in help and errors."""
    atexit.register(gc.freeze)  # otherwise the last collection searches all of torch for cycles: about a second
    parser = OneLineParser(prog=prog, description=description(__doc__))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=OneLineParser)
    argv = sys.argv[1:] if argv is None else argv
    for name, (module_name, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in argv[:1]:  # import only the command that is asked for
            module = importlib.import_module(module_name)
            command.description = description(module.__doc__)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return guard(parser, lambda args: args.run(args), argv)


if __name__ == "__main__":
    sys.exit(main(prog="python -m mini_engine"))
