"""The process of an embedding PS. Imports little, so that one that joins or restarts serves soon."""

from __future__ import annotations

from persia import rpc
from persia.cluster import numa
from persia.cluster.ray.driver_folder import server_directory
from persia.cluster.ray.host import Host, cores, together, usable_processors
from persia.cluster.ray.process_plan import Plan, ServerSeat, Service
from persia.cluster.ray.stubs import reach, reach_coordinator
from persia.errors import StoreError
from persia.membership.listener import Listener
from persia.membership.reached_servers import ReachedServers
from persia.memory import host_memory
from persia.modes import decode
from persia.ps import EmbeddingServer, ServerOptions
from persia.ps.latest_reading import LatestReading
from persia.ps.regions import Regions, remove_leftovers
from persia.ps.shares import Shares
from persia.services import BucketMaps, Coordinator, EmbeddingPS, MovableRows, RecordableRows
from persia.telemetry.metrics import Metric, Readings
from persia.types import BucketMap

__all__ = ["EmbeddingServerHost"]


class EmbeddingServerHost(Host):
    """Process of an embedding PS. Its rows outlive the process; a restart retains its address."""

    role = "embedding_ps"

    def __init__(self, plan: Plan, rank: int, service: Service, shares: Shares, losses: int, seat: ServerSeat) -> None:
        super().__init__(plan, rank)
        schema, optimizer, mode, seed = service
        directory = f"{plan.name}/{server_directory(rank, losses)}"
        regions = f"{plan.options.regions}/{directory}" if plan.options.regions else None
        spills = [table.spill for table in schema.resolved_tables().values() if table.spill is not None]
        self._roots = list(dict.fromkeys([plan.options.regions, *spills])) if plan.options.regions else []
        address, has_left, buckets = self._predecessor()
        if not seat.attaches and losses and (regions is None or not Regions(regions).complete):
            address = ""  # The first process after a loss of rows: it has no rows, and no caller has its address.
        if address or seat.attaches:
            self._check_rows(address, regions)
            if regions is not None and not address:  # The stored number is the one of the driver that has died.
                Regions(regions).remember_nn_workers(plan.nn_workers)
        elif has_left or (losses and regions is not None and not Regions(regions).complete):
            # The previous process does not return; its rows are no longer needed.
            self._remove_files()
        # The host may differ from the one that was measured. After a loss, training continues on any available host.
        overcommit = plan.options.overcommit or losses > 0
        self._peers = ReachedServers(lambda member: reach(member, EmbeddingPS, plan), rpc.close, plan.options.timeout)
        options = ServerOptions(
            plan.nn_workers,
            plan.options.timeout,
            regions,
            seat.neighbours,
            **shares._asdict(),
            overcommit=overcommit,
            buckets=buckets,
            rank=rank,
            peer=lambda number: rpc.cast_to(MovableRows, self._peers.reach(number)),
        )
        directory_of_rows = plan.options.regions or None
        self._memory = LatestReading(lambda: host_memory(directory_of_rows))  # A disk may not answer.
        threads = cores(plan)
        numa.pin(seat.position, threads)
        self.servant = EmbeddingServer(schema.resolved_tables(), optimizer, decode(mode), seed, threads, options)
        self.join(self.serve(self.servant, together(EmbeddingPS, MovableRows, RecordableRows), address))

    def join(self, address: str) -> Coordinator:
        """Joins the membership, and follows the other PSs."""
        coordinator = super().join(address)
        self._listener = Listener(coordinator, self._peers.update)
        return coordinator

    def release(self) -> None:
        """Removes files that would outlive the process. Called when the cluster ends, or this PS has left."""
        self.servant.close()
        self._memory.close()

    def _remove_files(self) -> None:
        for root in self._roots:
            for pattern in (f"ps-{self.rank}", f"ps-{self.rank}.*"):
                remove_leftovers(root, f"{self.plan.name}/{pattern}")

    def _predecessor(self) -> tuple[str, bool, BucketMap]:
        """Marks the previous process as dead, unless it has left.

        Returns:
            Its address, empty if there is none that this process continues; whether one has left; and the bucket map of
            the run.
        """
        coordinator = reach_coordinator(self.plan)
        try:
            buckets = rpc.cast_to(BucketMaps, coordinator).map_state().buckets
            for member in coordinator.membership().members:
                if (member.role, member.rank) == (self.role, self.rank):
                    if member.state == "dead" and not member.reason:
                        return "", True, buckets
                    # Do not wait for the driver to notice the death: this process joins with the same address.
                    coordinator.depart(self.role, self.rank, member.incarnation, "it was restarted")
                    return member.address, False, buckets
        finally:
            rpc.close(coordinator)
        return "", False, buckets

    def _check_rows(self, address: str, regions: str | None) -> None:
        moved = address and not address.startswith(self.origin)
        if regions is None or moved or not Regions(regions).complete:
            died = f"at {address}" if address else "with its driver"
            raise StoreError(
                f"{self!r} died {died}, and its rows are not on this host: they were lost with the process or "
                "its host. Continue from the last checkpoint.",
                rank=self.rank,
                address=address,
            )

    def counters(self) -> dict[str, float]:
        """Returns counters by table and name. Uses the last known ones while a disk does not respond."""
        tables = self.servant.latest_statistics()
        return {f"{table}.{name}": float(value) for table, counts in tables.items() for name, value in counts.items()}

    def observe(self) -> Readings:
        """Returns metrics by table, and what this process and its host can use. Blocks for at most two seconds."""
        metrics, latencies, _ = self.servant.observe()
        memory, _ = self._memory.get()
        used = Metric("host_memory_share", max(0.0, 1 - memory.free / max(1, memory.total)), {})
        return Readings([*metrics, used, usable_processors(self.plan)], latencies)
