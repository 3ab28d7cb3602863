"""Lesson 13. Our policy as a request router of Ray Serve: Ray knows the replicas, the policy chooses one.

Ray's router classes give a chosen replica to the first waiting request, not to the one it was chosen for. That would
send a prompt to another prompt's replica, so this one does not use their FIFOMixin. It runs in the server's process.
"""

# pyright: reportMissingImports=false

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from mini_engine.distributed.replicas.loads import Routing, make_policy


class PolicyRouter(RequestRouter):
    """Routes with a policy of lesson 13. The second argument of a call holds the keys of its prompt's blocks."""

    def initialize_state(self, policy: str, beta: float) -> None:
        """Take the settings from `request_router_kwargs`."""
        self.settings = policy, beta
        self.made: Routing[ReplicaID] | None = None

    def routing(self, replica: RunningReplica) -> Routing[ReplicaID]:
        """Return the policy with its loads. It is created when the first replica reports its number of blocks."""
        if self.made is None:
            self.made = Routing(make_policy(*self.settings, replica.replica_metadata["num_blocks"]))
        return self.made

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the policy's choice as the only candidate."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        routing = self.routing(candidate_replicas[0])
        for replica_id, replica in replicas.items():
            routing.learn(replica_id, replica.routing_stats.get("reports", ()))
        name = pending_request.metadata.internal_request_id
        return [[replicas[routing.choose(name, pending_request.args[1], list(replicas))]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note which replica a prompt was sent to."""
        if self.made is not None:
            self.made.sent(pending_request.metadata.internal_request_id, pending_request.args[1], replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a request has ended, for any reason."""
        if self.made is not None:
            self.made.ended(internal_request_id)
