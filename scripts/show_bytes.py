"""Lesson 6. Shows each token of a text, its bytes, and the text that it completes."""

import sys

from scripts.smoke.arguments import pocket_dir
from scripts.smoke.report import print_json

from mini_engine.cli.parser import OneLineParser, guard


def arguments():
    parser = OneLineParser(description=__doc__)
    parser.add_argument("text", help="any text")
    parser.add_argument(
        "--model", metavar="DIR_OR_HUB_ID", help="checkpoint whose tokenizer to use (default: the pocket model)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def run(args) -> int:
    from rich.console import Console

    from lessons._course.tables import Column, show
    from mini_engine.text.detokenizer import Detokenizer
    from mini_engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(args.model or pocket_dir())
    detokenizer, rows = Detokenizer(tokenizer.token_bytes, tokenizer.special_ids), []
    for token in tokenizer.encode(args.text):
        data = tokenizer.token_bytes[token]
        alone = data.decode("utf-8", errors="replace")
        rows.append({"id": token, "bytes": data.hex(" "), "streamed": detokenizer.push(token), "alone": alone})
    if args.json:
        print_json({"tokens": rows, "rest": detokenizer.finish()})
        return 0
    columns = [Column("token id"), *(Column(title, is_text=True) for title in ("bytes", "streamed", "decoded alone"))]
    cells = [[str(row["id"]), row["bytes"], repr(row["streamed"]), repr(row["alone"])] for row in rows]
    show(Console(highlight=False), columns, cells)
    return 0


def main(argv=None) -> int:
    return guard(arguments(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
