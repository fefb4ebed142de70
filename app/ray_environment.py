"""Environment variables that Ray and Ray Serve read at their import, with reasons.

No Python proxy is on a token's path: several replicas are behind HAProxy, and a single one answers
HTTP itself. The rest makes a cluster of one machine small, quiet and private.
"""

from __future__ import annotations

import os

DRAIN_S = 600.0  # default time for a leaving replica to finish its streams

ENVIRONMENT = {
    # Replicas answer HTTP themselves, on their own event loop, behind HAProxy.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "app.api.http.guard.middlewares",
    # A replica that answers HTTP itself waits this long for a load balancer to notice its end.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    # On a busy machine a proxy may start slowly.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Logs go only to Ray's files, each line once, and no usage is reported.
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The loads that a fleet is scaled by are at most a few seconds old.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    # Ray's own processes use only the loopback address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # By default Ray runs workers at nice 15, so that tokens would wait for any other process.
    "RAY_worker_niceness": "0",
    # A replica that reserves no GPU keeps the devices it sees.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's daemons poll for clusters of thousands of nodes; on one machine it only costs idle CPU.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "EVENT_AGENT_REPORT_INTERVAL_SECONDS": "10",
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "60",
    "RAY_raylet_check_gc_period_milliseconds": "2000",
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "5000",
    "RAY_kill_idle_workers_interval_ms": "5000",
    "RAY_memory_monitor_refresh_ms": "2000",
    "RAY_metrics_report_interval_ms": "60000",
    # Logs are rotated, so that they do not fill the disk.
    "RAY_ROTATION_MAX_BYTES": "33554432",
    "RAY_ROTATION_BACKUP_COUNT": "2",
    # Ray's own telemetry, which Legato does not use.
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    # As many worker processes as CPUs would start at once; `local_ray` says how many should.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_num_workers_soft_limit": "5",
}


def set_environment(haproxy: bool = True) -> None:
    """Set what the user's environment does not; has an effect only before `ray` is imported.

    haproxy: False if no proxy should run, which also overrides the user's environment.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not haproxy:
        os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
