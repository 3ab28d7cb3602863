"""Lesson 13. A replica in this process for tests, and the server's side of it."""

from argparse import Namespace

from mini_engine.cli import serve
from mini_engine.cli.parser import OneLineParser
from mini_engine.distributed.replicas.cluster import Cluster
from mini_engine.distributed.replicas.replica import Replica
from mini_engine.engine.sampling_params import SamplingParams

PROMPT = list(range(100, 140))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def options(*argv: str) -> Namespace:
    """Return the arguments of `serve`."""
    parser = OneLineParser(prog="serve")
    serve.add_arguments(parser)
    return parser.parse_args(["--num-blocks", "60", *argv])


def cluster(replica: Replica, ask=None) -> Cluster:
    """Return a cluster of this replica. ask: how it is asked, if not directly."""
    return Cluster(replica.worker.tokenizer, replica.limits(), 8, ask or replica.answer, replica.close_session)
