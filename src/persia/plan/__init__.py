"""Plans deployments: bytes of tables, hosts by role, traffic, rates and bottlenecks, from rates that were measured.

Nothing here starts a process of a cluster. `persia plan` prints a plan, and `persia bench rates` measures the rates.
"""

from persia.plan.deployment import DeploymentPlan, HostPlan, Limit, PlanRequest, RolePlan, plan_deployment
from persia.plan.host_kinds import HostKind, load_hosts, share_a_host, this_host
from persia.plan.load import RoleLoad, Topology, role_loads
from persia.plan.rates import Rates, RateSource, load_rates, row_key, save_rates, workload_key
from persia.plan.ray_launcher import ENLARGE_REGIONS, cluster_file, in_shared_memory, place_of
from persia.plan.table_bytes import PlannedTable, TableBytes, bytes_of, planned_tables

__all__ = [
    "ENLARGE_REGIONS",
    "DeploymentPlan",
    "HostKind",
    "HostPlan",
    "Limit",
    "PlanRequest",
    "PlannedTable",
    "RateSource",
    "Rates",
    "RoleLoad",
    "RolePlan",
    "TableBytes",
    "Topology",
    "bytes_of",
    "cluster_file",
    "in_shared_memory",
    "load_hosts",
    "load_rates",
    "place_of",
    "plan_deployment",
    "planned_tables",
    "role_loads",
    "row_key",
    "save_rates",
    "share_a_host",
    "this_host",
    "workload_key",
]
