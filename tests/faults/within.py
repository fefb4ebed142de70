"""How soon each fault must be over, in seconds, on a quiet machine of two cores.

The times of the fault table, and those that the product states elsewhere. A machine that does other
work meanwhile may take longer: LEGATO_FAULTS_FACTOR multiplies them.
"""

from __future__ import annotations

import os

_FACTOR = float(os.environ.get("LEGATO_FAULTS_FACTOR", "1"))

STEP_DEADLINE_S = 2.0  # of the servers under test
SEND_TIMEOUT_S = 3.0
BODY_TIMEOUT_S = 2.0

STAGE_KILLED_S = 5.0 * _FACTOR
STAGE_FROZEN_S = STEP_DEADLINE_S + 5.0 * _FACTOR
STANDBY_READY_S = 40.0 + 10.0 * _FACTOR  # after a loss the next attempt waits 30 s
SCHEDULER_KILLED_S = 5.0 * _FACTOR
REBUILT_S = 20.0 * _FACTOR  # a new request waits so long for an engine
KILLED_WHILE_LOADING_S = 20.0 * _FACTOR
OVERLOAD_REFUSED_S = 5.0 * _FACTOR
FULL_REFUSED_S = 20.0 + 10.0 * _FACTOR  # a new request waits 20 s for an engine
CLIENTS_GONE_S = 1.0 * _FACTOR
READERS_DROPPED_S = SEND_TIMEOUT_S + 3.0 * _FACTOR
BODY_REFUSED_S = BODY_TIMEOUT_S + 3.0 * _FACTOR
BAD_REQUEST_S = 1.0 * _FACTOR
GRAMMAR_REFUSED_S = 2.0 * _FACTOR
SETTINGS_S = 2.0 * _FACTOR
LOOP_LAG_S = 0.1 * _FACTOR  # the longest that any other request waits for the event loop
COMMAND_KILLED_S = 20.0 * _FACTOR
SETTLED_S = 10.0 * _FACTOR  # blocks, processes and connections are as they were
SERVER_WITH_BATCH_ENDS_S = 15.0 * _FACTOR
