"""Telemetry of a run: progress line (`live`), trackers (`tracking`), metrics of every role (`metrics`), Prometheus.

This package imports none of its modules, so that parameter servers start without a terminal or a web server.
"""
