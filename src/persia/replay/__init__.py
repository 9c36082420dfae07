"""Training in virtual time: any mode, in one process, without sockets or waiting.

`simulate` computes the times of all events from the speeds of the NN workers. `replay` trains along such a timeline,
or along one that a run has recorded. Both call the same pure functions of the mode as the cluster does.
"""

from persia.replay.comparison import ReportLine, record, table
from persia.replay.follow import Compute, replay
from persia.replay.local_all_reduce import LocalAllReduce
from persia.replay.plain import PlainRows, PlainTable
from persia.replay.records import Records, check_replayable, recorded
from persia.replay.replay_servers import ReplayDense, ReplayRows, ReplayServer, TakenGradient
from persia.replay.schedule import ScheduleEvent, Summary, Timeline, load_timeline
from persia.replay.simulate import Setting, simulate
from persia.replay.speed_trace import Slowdown, Trace, alternating, load_trace, phases, stalls, steady

__all__ = [
    "Compute",
    "LocalAllReduce",
    "PlainRows",
    "PlainTable",
    "Records",
    "ReplayDense",
    "ReplayRows",
    "ReplayServer",
    "ReportLine",
    "ScheduleEvent",
    "Setting",
    "Slowdown",
    "Summary",
    "TakenGradient",
    "Timeline",
    "Trace",
    "alternating",
    "check_replayable",
    "load_timeline",
    "load_trace",
    "phases",
    "record",
    "recorded",
    "replay",
    "simulate",
    "stalls",
    "steady",
    "table",
]
