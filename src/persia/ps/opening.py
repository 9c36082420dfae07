"""Opens the tables of a PS: creates them in memory, in regions or on disk, or attaches to existing regions."""

from __future__ import annotations

from collections.abc import Mapping

from persia.memory import host_memory
from persia.ps.memory_checks import check_free, check_share
from persia.ps.options import ServerOptions
from persia.ps.regions import Regions, taken_space
from persia.ps.shares import Shares, divide_tables, rows_of_undeclared, table_sizes
from persia.ps.spill import SpillPlaces, warn_of_disks
from persia.ps.table_configs import table_config
from persia.schema import EmbeddingOptimizer, Table
from persia.store import EmbeddingStore

__all__ = ["open_tables"]


def open_tables(
    store: EmbeddingStore,
    tables: Mapping[str, Table],
    optimizer: EmbeddingOptimizer,
    seed: int,
    options: ServerOptions,
    regions: Regions | None,
) -> None:
    """Creates the tables of a PS in an empty store, or attaches to the tables in the regions.

    Args:
        store: an empty store.
        tables: tables by name, with their optimizers filled in.
        optimizer: the default optimizer.
        seed: seed of row initialisation and admission.
        options: options of the PS.
        regions: regions in which rows outlive the process; None if rows do not.

    Raises:
        ConfigError: the declared capacity of the tables exceeds the memory of this host.
        StoreError: the regions are in use, damaged, or of other tables.
        StoreFullError: there is no space for the regions.
    """
    shares = _shares(tables, optimizer, options, regions)
    capacities = rows_of_undeclared(tables, optimizer, host_memory() if regions is None else None) | shares.capacities
    configs = {
        name: table_config(table, seed, capacities.get(name), shares.memory_rows.get(name, 0))
        for name, table in tables.items()
    }
    roots = {name: table.spill for name, table in tables.items() if table.spill is not None}
    places = SpillPlaces(roots, regions.directory if regions is not None else None)
    attached = False
    if regions is not None:
        attached = regions.create_or_attach(store, list(configs.values()), roots)
    else:
        places.create()
        for number, (name, config) in enumerate(configs.items()):
            store.create_table(config, spill=places.path(number, name))
    if roots and not attached:
        warn_of_disks(places, table_sizes(tables, optimizer, shares), configs, options.neighbours)


def _shares(
    tables: Mapping[str, Table], optimizer: EmbeddingOptimizer, options: ServerOptions, regions: Regions | None
) -> Shares:
    """Returns the number of rows of each table for this PS, and checks that there is memory for them."""
    place = options.regions
    spills = any(table.spill is not None for table in tables.values())
    if place is None and not spills and all(table.capacity is None for table in tables.values()):
        return Shares({}, {})
    memory = host_memory(place).shared(options.neighbours, taken_space(place) if place else 0)
    attaches = regions is not None and regions.complete
    if options.capacities is None:
        shares = divide_tables(tables, optimizer, [memory], attaches or options.overcommit)[0]
    else:
        shares = Shares(dict(options.capacities), dict(options.memory_rows or {}))
    if not attaches:
        sizes = table_sizes(tables, optimizer, shares)
        if not options.overcommit:
            check_share(sizes, memory)
        check_free(sizes, memory, place)
    return shares
